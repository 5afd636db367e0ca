"""Scores of output rows against NumPy's log-softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines import Token, batch_of, open_context, random_ids, run_of
from support.models import N_VOCAB

import pykvgraph as kvg


def check(scores: kvg.Scores, logits: np.ndarray) -> None:
    exact = logits.astype(np.float64)
    greatest = exact.max(axis=1)
    log_sum = greatest + np.log(np.exp(exact - greatest[:, None]).sum(axis=1))
    assert np.array_equal(scores.best, logits.argmax(axis=1))
    assert np.allclose(scores.log_sum, log_sum, rtol=1e-6, atol=1e-5)
    assert np.allclose(scores.best_logprob, greatest - log_sum, rtol=1e-6, atol=1e-5)
    assert [column.dtype for column in scores] == [np.int32, np.float32, np.float32]


# the last: so many logits that threads share the rows
@pytest.mark.parametrize(("n_tokens", "n_threads"), [(1, 1), (21, 1), (2000, 2)])
def test_every_row_has_its_own(small: kvg.Model, n_tokens: int, n_threads: int) -> None:
    tokens = run_of(random_ids(n_tokens, N_VOCAB))
    with open_context(small, n_ctx=2000, n_batch=2000, n_ubatch=512, n_threads_batch=n_threads) as ctx:
        ctx.decode(batch_of(tokens), scores=True)
        assert len(ctx.logits()) == n_tokens
        check(ctx.scores(), ctx.logits())


def test_rows_are_those_that_asked(small: kvg.Model) -> None:
    ids = random_ids(9, N_VOCAB)
    with open_context(small, n_ctx=32, n_ubatch=4) as ctx:
        ctx.decode(batch_of(Token(id, i, logits=i in (1, 2, 7)) for i, id in enumerate(ids)), scores=True)
        assert len(ctx.scores().best) == 3
        check(ctx.scores(), ctx.logits())


def test_decode_last_and_append_have_scores(small: kvg.Model) -> None:
    with open_context(small, n_ctx=32) as ctx:
        ctx.decode_last(batch_of(run_of(random_ids(5, N_VOCAB))))
        check(ctx.scores(), ctx.logits())
        ctx.append(7)
        check(ctx.scores(), ctx.logits())


def test_no_output_has_no_scores(small: kvg.Model) -> None:
    with open_context(small, n_ctx=32) as ctx:
        ctx.decode(batch_of([Token(5, 0, logits=False)]), scores=True)
        assert ctx.scores().best.shape == (0,)


def test_scores_that_nobody_asked_for(small: kvg.Model) -> None:
    with open_context(small, n_ctx=4) as ctx:
        with pytest.raises(kvg.InvalidArgumentError, match="no decode"):
            ctx.scores()
        ctx.append(5)
        ctx.decode(batch_of([Token(5, 1)]))
        with pytest.raises(kvg.InvalidArgumentError, match="scores=True"):
            ctx.scores()
        with pytest.raises(kvg.InvalidArgumentError, match="scores"):
            ctx.decode(batch_of([Token(5, 2)]), scores=1)  # type: ignore[arg-type]
        kept = ctx.append(5), ctx.scores()
        ctx.append(6)
        check(kept[1], kept[0][None])  # copies

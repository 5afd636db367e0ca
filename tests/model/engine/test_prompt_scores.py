"""Probabilities of a prompt's tokens, of every kind of cache, against one decode of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engines import ids_of
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.engine.prompt_scores import prompt_scores

N_TOKENS = 200  # several parts
TALK = kvg.SamplingParams(max_tokens=4)


def engine_of(model: kvg.Model, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=1024, n_seq_max=2, **F32, **options)


def by_hand(model: kvg.Model, ids: list[int]) -> Any:
    """(n_tokens, n_vocab): log probabilities of what comes behind each token, float64."""
    with kvg.Context(model, n_ctx=512, n_batch=512, **F32) as ctx:
        batch = kvg.Batch()
        batch.extend(ids, 0, (0,), "all")
        ctx.decode(batch)
        logits = ctx.logits().astype("f8")
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("options", [{}, {"background": False}, {"prefix_cache": False}], ids=str)
def test_they_are_those_of_one_decode(model: kvg.Model, options: dict[str, Any]) -> None:
    ids = ids_of(model, N_TOKENS, 4)
    wanted = by_hand(model, ids)
    with engine_of(model, **options) as engine:
        talk = engine.submit(ids_of(model, 30, 5), kvg.SamplingParams(max_tokens=50))
        for _ in range(2):  # decoded, and found
            scores = prompt_scores(engine, ids, 2)
            assert [score.token for score in scores] == ids[1:]
            own = [wanted[i, token] for i, token in enumerate(ids[1:])]
            assert [score.logprob for score in scores] == pytest.approx(own, abs=1e-3)
            for score, row in zip(scores, wanted, strict=False):
                assert [value for _, value in score.top] == pytest.approx(np.sort(row)[:-3:-1], abs=1e-3)
        assert len(talk.result().tokens) > 0
        said = engine.submit(ids, TALK).result()
        if options.get("prefix_cache", True):
            assert said.n_cached == N_TOKENS - 1


def test_short_prompts_and_those_that_nobody_wants(model: kvg.Model) -> None:
    with engine_of(model) as engine:
        assert prompt_scores(engine, [5], 3) == []
        assert len(prompt_scores(engine, [5, 6], 0)) == 1
        wanted = iter([True, False])
        assert len(prompt_scores(engine, ids_of(model, N_TOKENS, 6), 0, is_wanted=lambda: next(wanted))) == 64
        with pytest.raises(kvg.InvalidArgumentError, match="empty"):
            prompt_scores(engine, [], 0)
        with pytest.raises(kvg.CacheFullError):
            prompt_scores(engine, [5] * 2000, 0)

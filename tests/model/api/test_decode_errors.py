"""What decode refuses, and that it then changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engines import Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB, SMALL, TINY, ModelSpec

import pykvgraph as kvg

N_CELLS, N_BATCH, N_SEQ = 32, 20, 3


@pytest.fixture
def ctx(small: kvg.Model) -> Iterator[kvg.Context]:
    """Sequence 0 at 0..9, sequence 1 sees the first five of them, sequence 2 has 0..1 of its own."""
    options = {"n_ctx": N_CELLS, "n_batch": N_BATCH, "n_ubatch": 4, "n_seq_max": N_SEQ}
    with open_context(small, **options) as ctx:
        decode(ctx, run_of(random_ids(10, N_VOCAB)))
        ctx.kv.seq_cp(0, 1, 0, 5)
        decode(ctx, run_of([5, 6], 0, (2,)))
        yield ctx


def raises_and_changes_nothing(ctx: kvg.Context, error: type[Exception], tokens: list[Token]) -> str:
    """Decodes what must be refused; the message."""
    before, k = ctx.kv.cells(), ctx.kv.read_k(1)
    used = before.pos >= 0
    with pytest.raises(error) as info:
        decode(ctx, tokens)
    after = ctx.kv.cells()
    assert np.array_equal(after.pos, before.pos)
    assert np.array_equal(after.seq, before.seq)
    assert np.array_equal(after.shift, before.shift)
    assert np.array_equal(ctx.kv.read_k(1)[used], k[used])
    return str(info.value)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([], id="empty batch"),
        pytest.param([Token(-1, 10)], id="negative token"),
        pytest.param([Token(N_VOCAB, 10)], id="token beyond the vocabulary"),
        pytest.param([Token(5, 10), Token(N_VOCAB, 11)], id="second token beyond the vocabulary"),
        pytest.param([Token(5, -1)], id="negative position"),
        pytest.param([Token(5, 9)], id="the last position again"),
        pytest.param([Token(5, 3)], id="a position in the middle"),
        pytest.param([Token(5, 2**31)], id="position beyond int32"),
        pytest.param([Token(5, 10), Token(6, 10)], id="one position twice"),
        pytest.param([Token(5, 11), Token(6, 10)], id="positions fall"),
        pytest.param([Token(5, 10), Token(6, 3, (1,)), Token(7, 11)], id="second sequence too early"),
        pytest.param([Token(5, 10, (N_SEQ,))], id="sequence beyond n_seq_max"),
        pytest.param([Token(5, 10, (-1,))], id="negative sequence"),
        pytest.param([Token(5, 10, ())], id="no sequence"),
        pytest.param([Token(5, 10, (0, N_SEQ))], id="second sequence id beyond n_seq_max"),
        pytest.param([Token(5, 10, (0, 1))], id="sequences that see different cells"),
        pytest.param([Token(5, 10, (1, 2))], id="sequences that share nothing"),
        pytest.param([Token(5, 10, (0,)), Token(6, 11, (0, 1))], id="different cells after the batch itself"),
        pytest.param(run_of(range(3, 3 + N_BATCH + 1), 10), id="more than n_batch tokens"),
    ],
)
def test_invalid_batch(ctx: kvg.Context, tokens: list[Token]) -> None:
    message = raises_and_changes_nothing(ctx, kvg.InvalidArgumentError, tokens)
    assert len(message) > 10


def test_no_checkpoint_behind_the_last_position(ctx: kvg.Context) -> None:
    """As another process may send it: Batch.add refuses it."""
    batch = kvg.Batch()
    batch.add(1, 2**31 - 1, (2,))
    arrays = replace(batch.snapshot(), checkpoint=np.ones(1, np.uint8))
    with pytest.raises(kvg.InvalidArgumentError, match=r"token 0 .* checkpoint behind the last position"):
        ctx.decode(kvg.Batch._of(arrays))
    assert ctx.kv.seq_pos_max(2) == 1


def test_sequences_part_within_the_batch(ctx: kvg.Context) -> None:
    """0 and 1 see the same cells until a token of the batch itself is seen by one of them only."""
    ctx.kv.seq_rm(0, 5, -1)
    together = [Token(5, 5, (0, 1)), Token(6, 6, (0, 1))]
    parted = [*together, Token(7, 7, (1,)), Token(8, 8, (0, 1))]
    raises_and_changes_nothing(ctx, kvg.InvalidArgumentError, parted)
    assert decode(ctx, [*together, Token(7, 7, (1,)), Token(8, 7, (0,))]).shape[0] == 4


def test_pending_work_stays_pending(ctx: kvg.Context) -> None:
    ctx.kv.seq_add(2, 0, -1, 4)
    before = ctx.kv.cells()
    with pytest.raises(kvg.InvalidArgumentError):
        decode(ctx, [Token(5, 2, (2,))])
    assert np.array_equal(ctx.kv.cells().shift, before.shift)
    assert ctx.kv.update().shifted_cells == 2


@pytest.mark.parametrize("defrag_threshold", [-1, 0.1])
def test_full_cache(small: kvg.Model, defrag_threshold: float) -> None:
    """One token too many changes nothing, pending work included; the rest then fits exactly."""
    ids = random_ids(40, N_VOCAB)
    # plain attention: flash adds up F16 values in the order of the cells
    options = {"flash_attn": "off", "defrag_threshold": defrag_threshold}
    with open_context(small, n_ctx=24, n_batch=24, n_ubatch=4, **options) as ctx:
        decode(ctx, run_of(ids[:20]))
        ctx.kv.seq_rm(0, 4, 10)
        ctx.kv.seq_add(0, 10, -1, -6)
        before = ctx.kv.cells()
        with pytest.raises(kvg.CacheFullError, match="n_ctx"):
            decode(ctx, run_of(ids[:11], 14))
        for name in ("pos", "seq", "shift"):
            assert np.array_equal(getattr(ctx.kv.cells(), name), getattr(before, name))
        with pytest.raises(kvg.KVGraphError):
            ctx.logits()
        rows = decode(ctx, run_of(ids[:10], 14))
        with pytest.raises(kvg.CacheFullError):
            decode(ctx, [Token(5, 24)])
        assert ctx.kv.n_used == 24
    with open_context(small, n_ctx=64, **options) as roomy:
        decode(roomy, run_of(ids[:20]))
        roomy.kv.seq_rm(0, 4, 10)
        roomy.kv.seq_add(0, 10, -1, -6)
        assert nmse(rows, decode(roomy, run_of(ids[:10], 14))) <= 1e-6


def test_outputs_after_a_refused_batch(ctx: kvg.Context) -> None:
    """The outputs of the decode before are not passed off as this one's."""
    assert decode(ctx, [Token(5, 10)]).shape == (1, N_VOCAB)
    with pytest.raises(kvg.InvalidArgumentError):
        decode(ctx, [Token(5, 10)])
    for outputs in (ctx.logits, ctx.logits_view, ctx.embeddings):
        with pytest.raises(kvg.KVGraphError):
            outputs()
    assert decode(ctx, [Token(5, 11)]).shape == (1, N_VOCAB)


def test_outputs_before_any_decode_and_after_reset(small: kvg.Model) -> None:
    with open_context(small, n_ctx=N_CELLS) as ctx:
        with pytest.raises(kvg.KVGraphError):
            ctx.logits()
        decode(ctx, [Token(5, 0)])
        ctx.reset()
        assert (ctx.kv.n_used, ctx.kv.seq_pos_max(0)) == (0, -1)
        with pytest.raises(kvg.KVGraphError):
            ctx.logits()


@pytest.mark.parametrize("spec", [SMALL, TINY], ids=["two layers", "one layer"])
def test_no_outputs_asked(model_file: Callable[[ModelSpec], Path], spec: ModelSpec) -> None:
    """With one layer nothing is attended then: the cells are all that counts."""
    ids = random_ids(6, N_VOCAB)
    with kvg.Model(model_file(spec), device="cpu") as model, open_context(model, n_ctx=N_CELLS) as ctx:
        expected = decode(ctx, run_of(ids))[-1:]
        ctx.reset()
        silent = [token._replace(logits=False) for token in run_of(ids[:5])]
        assert decode(ctx, silent).shape == (0, N_VOCAB)
        assert ctx.embeddings().shape == (0, model.n_embd)
        assert ctx.kv.n_used == 5
        assert nmse(decode(ctx, [Token(ids[5], 5)]), expected) <= 1e-6


def test_gaps_are_allowed(ctx: kvg.Context) -> None:
    decode(ctx, [Token(5, 14), Token(6, 20), Token(7, 2**31 - 1)])
    assert ctx.kv.seq_pos_max(0) == 2**31 - 1


@pytest.mark.parametrize("batch", [None, [], [1, 2], "text"])
def test_what_is_no_batch(ctx: kvg.Context, batch: object) -> None:
    with pytest.raises((kvg.InvalidArgumentError, TypeError)):
        ctx.decode(batch)  # type: ignore[arg-type]


def test_decode_last_of_a_batch_without_logits_decodes_nothing(ctx: kvg.Context) -> None:
    before = ctx.kv.cells()
    batch = kvg.Batch()
    batch.extend([5, 6], 10, logits=False)
    with pytest.raises(kvg.InvalidArgumentError, match="asked for logits"):
        ctx.decode_last(batch)
    assert np.array_equal(ctx.kv.cells().pos, before.pos)
    batch.add(7, 12, logits=True)
    assert np.array_equal(ctx.decode_last(batch), ctx.logits()[-1])


def test_append_is_a_batch_of_one_at_the_end(small: kvg.Model) -> None:
    with open_context(small, n_ctx=4, n_seq_max=2) as ctx, open_context(small, n_ctx=4, n_seq_max=2) as other:
        for token, seq in [(3, 1), (5, 0), (7, 1), (9, 1)]:
            batch = kvg.Batch()
            batch.add(token, other.kv.seq_pos_max(seq) + 1, (seq,), logits=True)
            assert np.array_equal(ctx.append(token, seq), other.decode_last(batch))
            assert np.array_equal(ctx.logits(), other.logits())
            assert np.array_equal(ctx.embeddings(), other.embeddings())
        assert np.array_equal(ctx.kv.cells().pos, other.kv.cells().pos)
        cells = ctx.kv.cells()
        for token, seq in [(-1, 0), (small.n_vocab, 0), (3, 2), (3, -1), (2**63, 0), (3, 2**63)]:
            with pytest.raises(kvg.InvalidArgumentError):
                ctx.append(token, seq)
        with pytest.raises(kvg.CacheFullError):
            ctx.append(3)
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.logits()
        assert np.array_equal(ctx.kv.cells().pos, cells.pos)

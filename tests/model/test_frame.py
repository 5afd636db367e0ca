"""A shift that most cells share: they keep their K, and what is decoded stands aside as far as they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.drift import rms
from support.engines import Logits, Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import allowed_drift, contents, fresh_k
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device
ModelFile = Callable[[ModelSpec], Path]

SPEC = ModelSpec(n_layer=2, n_embd=128, n_head=4, n_head_kv=2, rope_factors=True, seed=6)  # heads of 32
N_KEEP, N_DISCARD, N_CTX = 4, 20, 64


def slide(kv: kvg.KVCache, *, for_decode: bool, seq: int = 0) -> kvg.UpdateStats:
    """Gives up what comes after the kept positions."""
    kv.seq_rm(seq, N_KEEP, N_KEEP + N_DISCARD)
    kv.seq_add(seq, N_KEEP + N_DISCARD, -1, -N_DISCARD)
    kv.defrag("fill")
    return kv.update(for_decode=for_decode)


def go_on(ctx: kvg.Context, n: int, seed: int) -> Logits:
    """A few tokens at once, then one by one."""
    pos = ctx.kv.seq_pos_max(0) + 1
    tokens = run_of(random_ids(n, N_VOCAB, seed), pos)
    return np.concatenate([decode(ctx, tokens[:5]), *(decode(ctx, [token]) for token in tokens[5:])])


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_logits_are_those_of_turned_k(model_file: ModelFile, kv_type: str, flash_attn: str) -> None:
    options = {"n_ctx": N_CTX, "type_k": kv_type, "type_v": kv_type, "flash_attn": flash_attn}
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, **options) as framed,
        open_context(model, **options) as turned,
    ):
        for ctx in (framed, turned):
            decode(ctx, run_of(random_ids(N_CTX, N_VOCAB)))
        n_rest = N_CTX - N_KEEP - N_DISCARD
        for i in range(3):
            shifted = [slide(ctx.kv, for_decode=ctx is framed).shifted_cells for ctx in (framed, turned)]
            assert shifted == [n_rest if i == 1 else N_KEEP, n_rest]
            rows = [go_on(ctx, N_DISCARD, i) for ctx in (framed, turned)]
            assert nmse(*rows) <= (1e-3 if not where.is_cpu() else 1e-9 if kv_type == "f32" else 1e-5)
        assert not framed.kv.cells().shift.any()


def test_k_is_turned_when_it_is_looked_at(model_file: ModelFile) -> None:
    """All of it, those that came in the frame too; V needn't be."""
    ids = random_ids(N_CTX, N_VOCAB)
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, n_ctx=N_CTX, type_k="f32") as ctx,
        open_context(model, n_ctx=N_CTX, type_k="f32") as other,
    ):
        decode(ctx, run_of(ids))
        slide(ctx.kv, for_decode=True)
        decode(ctx, run_of(ids[:N_DISCARD], N_CTX - N_DISCARD))
        ctx.kv.take_stats()
        ctx.kv.read_v(0)
        assert ctx.kv.take_stats().shifted_cells == 0
        k = ctx.kv.read_k(0)
        assert ctx.kv.take_stats().shifted_cells == N_CTX
        there = [*ids[:N_KEEP], *ids[N_KEEP + N_DISCARD :], *ids[:N_DISCARD]]
        fresh = fresh_k(other, run_of(there))
        order = np.argsort(ctx.kv.cells().pos)
        assert np.abs(k[order] - fresh).max() <= allowed_drift(fresh, "f32", N_CTX + N_DISCARD)
        ctx.kv.read_k(0)
        assert ctx.kv.take_stats().shifted_cells == 0


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_state_knows_no_frame(model_file: ModelFile, kv_type: str, whole: bool) -> None:
    """Saved in one, loaded into a cache that is in another: same K and V, and same logits."""
    options = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "type_k": kv_type, "type_v": kv_type}
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, **options) as ctx,
        open_context(model, **options) as other,
    ):
        for each, seed in ((ctx, 0), (other, 1)):
            decode(each, run_of(random_ids(N_CTX, N_VOCAB, seed), 0, (seed,)))
            slide(each.kv, for_decode=True, seq=seed)
            decode(each, run_of([7, 8], N_CTX - N_DISCARD, (seed,)))
        neighbour = None if whole else decode(other, [Token(9, N_CTX - N_DISCARD + 2, (1,))])
        seq = None if whole else 0
        other.kv.load(ctx.kv.save(seq), seq)
        assert contents(other.kv, model.n_layer, 0) == contents(ctx.kv, model.n_layer, 0)
        rows = [go_on(each, 10, 3) for each in (other, ctx)]
        assert nmse(*rows) <= (1e-9 if where.is_cpu() else 1e-3)
        if neighbour is not None:  # goes on as if nothing had been loaded beside it
            other.kv.seq_rm(1, N_CTX - N_DISCARD + 2, -1)
            again = decode(other, [Token(9, N_CTX - N_DISCARD + 2, (1,))])
            assert nmse(again, neighbour) <= (1e-3 if kv_type == "f16" or not where.is_cpu() else 2e-3)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_kept_cells_are_not_worn_down(model_file: ModelFile, kv_type: str) -> None:
    """A hundred context shifts, each of a third: nobody is rotated more than three times."""
    ids = random_ids(N_CTX, N_VOCAB)
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, n_ctx=N_CTX, type_k="f32") as exact,
        open_context(model, n_ctx=N_CTX, type_k=kv_type) as fresh,
        open_context(model, n_ctx=N_CTX, type_k=kv_type) as ctx,
    ):
        decode(ctx, run_of(ids))
        for _ in range(100):
            slide(ctx.kv, for_decode=True)
            decode(ctx, run_of(ids[:N_DISCARD], N_CTX - N_DISCARD))
        k = ctx.kv.read_k(0)[np.flatnonzero(ctx.kv.cells().pos < N_KEEP)]
        kept = run_of(ids[:N_KEEP])
        true = fresh_k(exact, kept)
        own = rms(fresh_k(fresh, kept) - true)
        assert rms(k - true) <= 1.5 * np.sqrt(1 + 3 + 1) * own  # read_k is one more


def test_two_sequences_that_shift_by_turns(model_file: ModelFile) -> None:
    """Each is right, whosever frame it is."""
    options = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, **options) as framed,
        open_context(model, **options) as turned,
    ):
        for ctx in (framed, turned):
            decode(ctx, run_of(random_ids(N_CTX, N_VOCAB), 0, (0,)))
            decode(ctx, run_of(random_ids(N_KEEP + N_DISCARD + 4, N_VOCAB, 1), 0, (1,)))
        for i in range(6):
            shifted = [slide(ctx.kv, for_decode=ctx is framed, seq=i % 2) for ctx in (framed, turned)]
            n_moved = 4 if i % 2 else 40
            assert [stats.shifted_cells for stats in shifted] == [32 if i in (0, 4) else n_moved, n_moved]
            pos = framed.kv.seq_pos_max(i % 2) + 1
            ids = random_ids(N_DISCARD, N_VOCAB, i)
            rows = [decode(ctx, run_of(ids, pos, (i % 2,))) for ctx in (framed, turned)]
            assert nmse(*rows) <= (1e-9 if where.is_cpu() else 1e-3)


def test_positions_at_both_ends(model_file: ModelFile) -> None:
    """A frame that these don't fit is given up before."""
    last = 2**31 - 1
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, n_ctx=N_CTX, n_seq_max=3, type_k="f32") as ctx,
    ):
        alone = [decode(ctx, run_of([5, 6, 7], pos, (1,))) for pos in (0,)]
        ctx.reset()
        decode(ctx, run_of(random_ids(20, N_VOCAB), 100))
        ctx.kv.seq_add(0, 0, -1, 50)
        decode(ctx, [Token(3, 170)])  # K stands 50 lower
        assert ctx.kv.take_stats().shifted_cells == 0
        assert nmse(decode(ctx, run_of([5, 6, 7], 0, (1,))), alone[0]) <= (1e-9 if where.is_cpu() else 1e-3)
        assert ctx.kv.take_stats().shifted_cells == 21
        ctx.kv.seq_rm(1, -1, -1)
        ctx.kv.seq_add(0, 0, -1, -50)
        decode(ctx, [Token(3, 121)])  # K stands 50 higher
        assert ctx.kv.take_stats().shifted_cells == 0
        assert np.isfinite(decode(ctx, [Token(3, last, (2,))])).all()
        assert ctx.kv.take_stats().shifted_cells == 22
        ctx.kv.seq_add(2, 0, -1, -last)
        assert np.isfinite(decode(ctx, [Token(3, 1, (2,))])).all()

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
from support.kv_rows import allowed_drift, cells_at, fresh_k
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
    """Micro-batches of three, and tokens one by one."""
    options = {"n_ctx": N_CTX, "n_ubatch": 3, "type_k": kv_type, "type_v": kv_type, "flash_attn": flash_attn}
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, **options) as framed,
        open_context(model, **options) as turned,
    ):
        for ctx in (framed, turned):
            decode(ctx, run_of(random_ids(N_CTX, N_VOCAB)))
        for i in range(4):
            shifted = [slide(ctx.kv, for_decode=ctx is framed).shifted_cells for ctx in (framed, turned)]
            assert shifted == [N_KEEP, N_CTX - N_KEEP - N_DISCARD]
            assert not framed.kv.cells().shift.any()
            rows = [go_on(ctx, N_DISCARD, i) for ctx in (framed, turned)]
            assert nmse(*rows) <= (1e-3 if not where.is_cpu() else 1e-9 if kv_type == "f32" else 1e-5)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_a_hundred_shifts_round_once(model_file: ModelFile, kv_type: str) -> None:
    """The kept cells once more than when they were written, from their originals; those that move never."""
    ids = random_ids(N_CTX, N_VOCAB)
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, n_ctx=N_CTX, type_k="f32") as exact,
        open_context(model, n_ctx=N_CTX, type_k=kv_type) as fresh,
        open_context(model, n_ctx=N_CTX, type_k=kv_type) as ctx,
    ):
        decode(ctx, run_of(ids))
        n_rest = N_CTX - N_KEEP - N_DISCARD
        for _ in range(100):
            assert slide(ctx.kv, for_decode=True).shifted_cells == N_KEEP
            decode(ctx, run_of(ids[:N_DISCARD], N_CTX - N_DISCARD))
        last = [*ids[:N_KEEP], *ids[:N_DISCARD], *ids[:N_DISCARD], *ids[:N_DISCARD]][: N_KEEP + n_rest]
        k = ctx.kv.read_k(0)[np.argsort(ctx.kv.cells().pos)][: len(last)]
        true = fresh_k(exact, run_of(last))
        errors = (k - true, fresh_k(fresh, run_of(last)) - true)
        angles = 1e-7 * (100 * N_DISCARD) * rms(true)  # ggml's, at 2,000
        kept, kept_own = (rms(error[:N_KEEP]) for error in errors)
        moved, moved_own = (rms(error[N_KEEP:]) for error in errors)
        assert kept <= 1.5 * np.sqrt(2) * kept_own + angles
        assert moved <= 1.2 * moved_own + angles


def test_looking_changes_nothing(model_file: ModelFile) -> None:
    """K is read as it is at its position, and saved so; the cells stay in their frame."""
    ids = random_ids(N_CTX, N_VOCAB)
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, n_ctx=N_CTX, type_k="q4_0") as ctx,
        open_context(model, n_ctx=N_CTX, type_k="q4_0") as watched,
        open_context(model, n_ctx=N_CTX, type_k="f32") as exact,
    ):
        for each in (ctx, watched):
            decode(each, run_of(ids))
            slide(each.kv, for_decode=True)
            decode(each, run_of(ids[:N_DISCARD], N_CTX - N_DISCARD))
        watched.kv.take_stats()
        blob = watched.kv.save()
        k = watched.kv.read_k(0)
        watched.kv.read_v(0)
        assert watched.kv.take_stats().shifted_cells == watched.kv.update().shifted_cells == 0
        there = [*ids[:N_KEEP], *ids[N_KEEP + N_DISCARD :], *ids[:N_DISCARD]]
        true = fresh_k(exact, run_of(there))
        assert rms(k[np.argsort(watched.kv.cells().pos)] - true) <= 0.15 * rms(true)
        assert watched.kv.save() == blob
        for each in (ctx, watched):
            each.kv.seq_rm(0, N_CTX - 5, -1)
        rows = [go_on(each, 5, 1) for each in (ctx, watched)]
        assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_state_knows_no_frame(model_file: ModelFile, kv_type: str, whole: bool) -> None:
    """Saved in one, loaded into a cache that is in another, it goes on where it was."""
    options = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "type_k": kv_type, "type_v": kv_type}
    limit = 1e-3 if kv_type == "q8_0" or not where.is_cpu() else 1e-5
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, **options) as ctx,
        open_context(model, **options) as other,
    ):
        for each, seed in ((ctx, 0), (other, 1)):
            decode(each, run_of(random_ids(N_CTX, N_VOCAB, seed), 0, (seed,)))
            slide(each.kv, for_decode=True, seq=seed)
            decode(each, run_of([7, 8], N_CTX - N_DISCARD, (seed,)))
        neighbour = decode(other, [Token(9, N_CTX - N_DISCARD + 2, (1,))])
        seq = None if whole else 0
        other.kv.load(ctx.kv.save(seq), seq)
        assert other.kv.seq_pos_max(1) == (-1 if whole else N_CTX - N_DISCARD + 2)
        if whole:
            assert other.kv.save() == ctx.kv.save()
        rows = [go_on(each, 10, 3) for each in (other, ctx)]
        assert nmse(*rows) <= limit
        if not whole:  # goes on as if nothing had been loaded beside it
            other.kv.seq_rm(1, N_CTX - N_DISCARD + 2, -1)
            again = decode(other, [Token(9, N_CTX - N_DISCARD + 2, (1,))])
            assert nmse(again, neighbour) <= limit


def test_neighbours_are_left_alone(model_file: ModelFile) -> None:
    """K of a sequence that doesn't move is rotated only if it is short, and right all the same."""
    options = {"n_ctx": 2 * N_CTX, "n_seq_max": 2, "type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, **options) as framed,
        open_context(model, **options) as turned,
    ):
        for n_idle, expected in ((10, 14), (40, 40)):  # originals are kept for 16 cells of 128
            for ctx in (framed, turned):
                ctx.reset()
                decode(ctx, run_of(random_ids(N_CTX, N_VOCAB), 0, (0,)))
                decode(ctx, run_of(random_ids(n_idle, N_VOCAB, 1), 0, (1,)))
            for i in range(3):
                shifted = [slide(ctx.kv, for_decode=ctx is framed).shifted_cells for ctx in (framed, turned)]
                assert shifted == [expected + (i if n_idle == 10 else 0), 40]
                ids = random_ids(N_DISCARD, N_VOCAB, i)
                rows = [decode(ctx, run_of(ids, N_CTX - N_DISCARD)) for ctx in (framed, turned)]
                assert nmse(*rows) <= (1e-9 if where.is_cpu() else 1e-3)
                rows = [decode(ctx, [Token(5, n_idle + i, (1,))]) for ctx in (framed, turned)]
                assert nmse(*rows) <= (1e-9 if where.is_cpu() else 1e-3)


def test_positions_at_both_ends(model_file: ModelFile) -> None:
    """A frame that these don't fit is given up before."""
    last = 2**31 - 1
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, n_ctx=N_CTX, n_seq_max=3, type_k="f32") as ctx,
    ):
        alone = decode(ctx, run_of([5, 6, 7], 0, (1,)))
        ctx.reset()
        decode(ctx, run_of(random_ids(20, N_VOCAB), 100))
        ctx.kv.seq_add(0, 0, -1, 50)
        decode(ctx, [Token(3, 170)])  # K stands 50 lower
        assert ctx.kv.take_stats().shifted_cells == 0
        assert nmse(decode(ctx, run_of([5, 6, 7], 0, (1,))), alone) <= (1e-9 if where.is_cpu() else 1e-3)
        assert ctx.kv.take_stats().shifted_cells == 21
        ctx.kv.seq_rm(1, -1, -1)
        ctx.kv.seq_add(0, 0, -1, -50)
        decode(ctx, [Token(3, 121)])  # K stands 50 higher
        assert ctx.kv.take_stats().shifted_cells == 0
        assert np.isfinite(decode(ctx, [Token(3, last, (2,))])).all()
        assert ctx.kv.take_stats().shifted_cells == 22
        ctx.kv.seq_add(2, 0, -1, -last)
        assert np.isfinite(decode(ctx, [Token(3, 1, (2,))])).all()


def test_a_frame_goes_back_before_it_goes_too_far(model_file: ModelFile) -> None:
    """ggml's angles get less exact with the position: after 8192 K is rotated once, and it begins again."""
    step = 500
    with (
        kvg.Model(model_file(SPEC), device=where.device) as model,
        open_context(model, n_ctx=N_CTX, type_k="f32") as ctx,
        open_context(model, n_ctx=N_CTX, type_k="f32") as fresh,
    ):
        decode(ctx, run_of(random_ids(N_CTX, N_VOCAB), 20000))
        ctx.kv.seq_rm(0, -1, 20010)
        counts = []
        for _ in range(20):
            ctx.kv.seq_add(0, 0, -1, -step)
            counts.append(ctx.kv.update(for_decode=True).shifted_cells)
        assert counts == [0] * 16 + [54] + [0] * 3
        there = run_of(random_ids(N_CTX, N_VOCAB)[10:], 20010 - 20 * step)
        k = ctx.kv.read_k(0)[cells_at(ctx.kv, [token.pos for token in there])]
        true = fresh_k(fresh, there)
        assert np.abs(k - true).max() <= allowed_drift(true, "f32", 20100, 2)

"""K-shift: positions move, and K is rotated with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.engines import (
    Engine,
    Logits,
    Token,
    decode,
    open_context,
    prompt_then_singles,
    random_ids,
    run_of,
)
from support.judge import judge, nmse
from support.kv_rows import ROUNDING, allowed_drift, cells_at, fresh_k
from support.models import N_VOCAB, SMALL, ModelSpec, WeightType

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

SPECS = [
    ModelSpec(n_layer=2, n_embd=64, n_head=8, n_head_kv=4, seed=1),  # heads of 8
    ModelSpec(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, rope_scale=4.0, seed=2),  # 16
    ModelSpec(n_layer=2, n_embd=128, n_head=4, n_head_kv=1, rope_factors=True, seed=3),  # 32
    ModelSpec(n_layer=1, n_embd=256, n_head=4, n_head_kv=2, weights=WeightType.F16, seed=4),  # 64
    ModelSpec(
        n_layer=1, n_embd=256, n_head=2, n_head_kv=1, rope_factors=True, rope_base=500000.0, seed=5
    ),  # 128
]
N_PROMPT, KEEP, DISCARD = 50, 8, 16


def discard(engine: Engine) -> None:
    """A prompt, of which positions KEEP .. KEEP + DISCARD go and the later ones follow up."""
    engine.decode(run_of(random_ids(N_PROMPT, N_VOCAB)))
    engine.seq_rm(0, KEEP, KEEP + DISCARD)
    engine.seq_add(0, KEEP + DISCARD, -1, -DISCARD)


def discard_and_go_on(engine: Engine) -> Logits:
    discard(engine)
    return prompt_then_singles(engine, random_ids(40, N_VOCAB, 1), 1, pos0=N_PROMPT - DISCARD)


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_logits_after_a_shift(model_file: Callable[[ModelSpec], Path], spec: ModelSpec, kv_type: str) -> None:
    judge(model_file(spec), discard_and_go_on, kv_type=kv_type)


def test_shift_forwards_and_of_one_sequence(model_file: Callable[[ModelSpec], Path]) -> None:
    def scenario(engine: Engine) -> Logits:
        for seq in range(2):
            engine.decode(run_of(random_ids(30, N_VOCAB, seq), 0, (seq,)))
        engine.seq_add(1, 0, -1, 100)
        ids = random_ids(20, N_VOCAB, 2)
        rows = [engine.decode([Token(ids[i], 30 + i, (0,)), Token(ids[i], 130 + i, (1,))]) for i in range(20)]
        return np.concatenate(rows)

    judge(model_file(SMALL), scenario, n_seq_max=2)


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("delta", [-40, 300])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_k_is_fresh_k_at_the_new_position(
    model_file: Callable[[ModelSpec], Path], spec: ModelSpec, delta: int, kv_type: str
) -> None:
    """Several runs of cells are shifted at once, with cells between them that stay."""
    moved = [*range(40, 60), *range(70, 71), *range(80, 96)]
    tokens = run_of(random_ids(96, N_VOCAB))
    expected = [token._replace(pos=token.pos + delta) for token in tokens if token.pos in moved]
    with (
        kvg.Model(model_file(spec), device=where.device) as model,
        open_context(model, n_ctx=128, type_k=kv_type, type_v=kv_type) as ctx,
    ):
        fresh = fresh_k(ctx, expected)
        ctx.reset()
        decode(ctx, tokens)
        before = ctx.kv.cells()
        still = np.flatnonzero((before.pos >= 0) & ~np.isin(before.pos, moved))
        shifted = np.flatnonzero(np.isin(before.pos, moved))
        k_before = ctx.kv.read_k(0)
        for p0, p1 in ((40, 60), (70, 71), (80, 96)):  # none lands in a range that is still to be moved
            ctx.kv.seq_add(0, p0, p1, delta)
        assert ctx.kv.update().shifted_cells == len(moved)
        k = ctx.kv.read_k(0)
    assert np.abs(k[shifted] - fresh).max() <= allowed_drift(fresh, kv_type, 96 + max(delta, 0))
    assert np.abs(k_before[shifted] - fresh).max() > 0.1  # there was something to rotate
    assert np.array_equal(k[still], k_before[still])


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize(("n", "stride"), [(200, 2), (64 * 40, 64)])
def test_more_runs_than_one_graph_takes_one_by_one(
    small: kvg.Model, n: int, stride: int, kv_type: str
) -> None:
    """Single cells, among others that stay to the byte."""
    tokens = run_of(random_ids(n, N_VOCAB))
    with open_context(small, n_ctx=n, n_batch=n, n_seq_max=2, type_k=kv_type) as ctx:
        fresh = fresh_k(ctx, [token._replace(pos=token.pos + 50) for token in tokens[1::stride]])
        ctx.reset()
        decode(
            ctx, [token._replace(seq_ids=(int(token.pos % stride == 1),), logits=False) for token in tokens]
        )
        k_before = ctx.kv.read_k(0)
        ctx.kv.seq_add(1, 0, -1, 50)
        assert ctx.kv.update().shifted_cells == n // stride
        k, seq = ctx.kv.read_k(0), ctx.kv.cells().seq
    assert np.abs(k[seq[:, 1]] - fresh).max() <= allowed_drift(fresh, kv_type, n + 50)
    assert np.array_equal(k[seq[:, 0]], k_before[seq[:, 0]])


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_adds_between_two_updates_are_one_rotation(small: kvg.Model, kv_type: str) -> None:
    """64 steps of -1 leave the bytes of one step of -64: nothing is rotated before it must be."""
    tokens = run_of(random_ids(32, N_VOCAB), 100)
    rows = []
    with open_context(small, n_ctx=64, type_k=kv_type) as ctx:
        for deltas in ([-64], [-1] * 64, [500, -300, -264]):
            ctx.reset()
            decode(ctx, tokens)
            for delta in deltas:
                ctx.kv.seq_add(0, -1, -1, delta)
            assert set(ctx.kv.cells().shift[:32]) == {-64}
            assert ctx.kv.update().shifted_cells == 32
            assert not ctx.kv.cells().shift.any()
            rows.append(ctx.kv.read_k(0))
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_drift_of_many_updates(small: kvg.Model, kv_type: str) -> None:
    n_updates, delta = 16, -7
    tokens = run_of(random_ids(40, N_VOCAB), 200)
    with open_context(small, n_ctx=64, type_k=kv_type) as ctx:
        fresh = fresh_k(ctx, [token._replace(pos=token.pos + n_updates * delta) for token in tokens])
        ctx.reset()
        decode(ctx, tokens)
        for _ in range(n_updates):
            ctx.kv.seq_add(0, 0, -1, delta)
            ctx.kv.update()
        k = ctx.kv.read_k(0)[cells_at(ctx.kv, [token.pos + n_updates * delta for token in tokens])]
    assert np.abs(k - fresh).max() <= allowed_drift(fresh, kv_type, 240, n_updates)


def test_values_and_deeper_layers(small: kvg.Model) -> None:
    """V is never rotated; K is in every layer, keeping its norm: a rotation and nothing else."""
    with open_context(small, n_ctx=64, type_k="f32", type_v="f32") as ctx:
        decode(ctx, run_of(random_ids(40, N_VOCAB)))
        before = [(ctx.kv.read_k(layer), ctx.kv.read_v(layer)) for layer in range(small.n_layer)]
        ctx.kv.seq_add(0, 0, -1, 33)
        ctx.kv.update()
        after = [(ctx.kv.read_k(layer), ctx.kv.read_v(layer)) for layer in range(small.n_layer)]
    for (k0, v0), (k1, v1) in zip(before, after, strict=True):
        assert np.array_equal(v0, v1)
        assert np.abs(k1 - k0).max() > 0.1
        norms = np.linalg.norm(k0, axis=2), np.linalg.norm(k1, axis=2)
        assert np.abs(norms[1] - norms[0]).max() <= ROUNDING["f32"] * norms[0].max()


def test_update_rotates_once_and_says_what_it_did(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of(random_ids(20, N_VOCAB)))
        ctx.kv.seq_add(0, 5, -1, 3)
        stats = ctx.kv.update()
        assert (stats.shifted_cells, stats.moved_cells, stats.moved_bytes) == (15, 0, 0)
        assert stats.graphs >= 1
        assert stats.seconds > 0
        again = ctx.kv.update()
        assert (again.shifted_cells, again.moved_cells, again.graphs) == (0, 0, 0)


@pytest.mark.parametrize("flush", ["decode", "read_k", "save"])
def test_pending_shift_is_done_before_it_is_needed(small: kvg.Model, flush: str) -> None:
    """decode, read_k and save find K rotated; a metadata operation and read_v don't rotate it."""
    ids = random_ids(20, N_VOCAB)
    with (
        open_context(small, n_ctx=64, type_k="f32") as by_hand,
        open_context(small, n_ctx=64, type_k="f32") as ctx,
    ):
        for each in (by_hand, ctx):
            decode(each, run_of(ids))
            each.kv.seq_add(0, 0, -1, 30)
        by_hand.kv.update()
        ctx.kv.seq_pos_max(0)
        ctx.kv.read_v(0)
        assert (ctx.kv.cells().shift[:20] == 30).all()
        if flush == "decode":
            rows = [decode(each, [Token(7, 50)]) for each in (by_hand, ctx)]
            assert nmse(rows[1], rows[0]) == 0
        elif flush == "read_k":
            ctx.kv.read_k(0)
        else:
            ctx.kv.save(0)
        assert not ctx.kv.cells().shift.any()
        assert np.array_equal(ctx.kv.read_k(0), by_hand.kv.read_k(0))


def test_adds_that_cancel_out_rotate_nothing(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of(random_ids(20, N_VOCAB)))
        before = ctx.kv.read_k(0)
        ctx.kv.seq_add(0, 0, -1, 40)
        ctx.kv.seq_add(0, 0, -1, -40)
        assert ctx.kv.update().shifted_cells == 0
        assert np.array_equal(ctx.kv.read_k(0), before)

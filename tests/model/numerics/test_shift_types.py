"""K-shift in every cache type, measured by what the type's own rounding costs.

The judge is a fresh cache in F32 at the new positions; errors are root mean squares over layer 0's K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.drift import drifts, rms
from support.engines import decode, open_context, random_ids, run_of
from support.kv_rows import cells_at, contents, fresh_k
from support.kv_types import QUANTIZED
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

ModelFile = Callable[[ModelSpec], Path]

# head size, type, hadamard
CASES = [
    *((head_dim, kv_type, False) for head_dim in (32, 64) for kv_type in ("f16", "bf16", *QUANTIZED)),
    # the matrix over whole heads, and over parts of them
    *((head_dim, kv_type, True) for head_dim in (128, 96, 32) for kv_type in QUANTIZED),
    *((head_dim, kv_type, True) for head_dim in (64, 192) for kv_type in ("q8_0", "q4_0")),
]


def spec(head_dim: int, rope_base: float = 10000.0) -> ModelSpec:
    return ModelSpec(n_layer=1, n_head=3, n_head_kv=3, head_dim=head_dim, rope_base=rope_base, seed=9)


@pytest.mark.parametrize(
    "deltas", [(-1,), pytest.param((-9,), marks=pytest.mark.any_device), (3, -3)], ids=str
)
@pytest.mark.parametrize(("head_dim", "kv_type", "hadamard"), CASES)
def test_one_update_and_a_hundred(
    model_file: ModelFile, head_dim: int, kv_type: str, hadamard: bool, deltas: tuple[int, ...]
) -> None:
    """At most 1.5 roundings after one update, 1.5 * sqrt(n) after n: small rotations' errors don't add up."""
    with kvg.Model(model_file(spec(head_dim)), device=where.device) as model:
        for n, drift in drifts(model, deltas, type_k=kv_type, hadamard=hadamard):
            assert drift <= 1.5 * np.sqrt(n), n


@pytest.mark.parametrize("delta", [100, 157])
@pytest.mark.parametrize(
    ("kv_type", "hadamard"), [("f16", True), ("bf16", True), ("q8_0", True), ("q8_0", False)]
)
def test_a_hundred_far_rotations(model_file: ModelFile, kv_type: str, hadamard: bool, delta: int) -> None:
    """As by a ContextShift. Some dimensions are back where they were after a few, and so would errors be."""
    with kvg.Model(model_file(spec(32)), device=where.device) as model:
        for n, drift in drifts(model, (delta,), type_k=kv_type, hadamard=hadamard):
            assert drift <= 1.5 * np.sqrt(n), n


@pytest.mark.parametrize(("outliers", "most"), [(30, 24), (300, 96)])
@pytest.mark.parametrize("kv_type", QUANTIZED)
def test_a_hundred_where_dimensions_differ(
    model_file: ModelFile, kv_type: str, outliers: float, most: float
) -> None:
    """What README tells: in roundings, which are smaller there than without the rotation."""
    for head_dim in (32, 128):
        path = model_file(replace(spec(head_dim), outliers=outliers))
        with kvg.Model(path, device="cpu") as model:
            *_, (n, drift) = drifts(model, (3, -3), type_k=kv_type)
            assert n == 100
            assert drift <= most


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_more_than_there_are_dithers(model_file: ModelFile, kv_type: str) -> None:
    """They come again after 254, and so might errors. (In 4 bits there is nothing left of K by then.)"""
    with kvg.Model(model_file(spec(32, rope_base=1e6)), device=where.device) as model:
        for n, drift in drifts(model, (1,), n_updates=600, type_k=kv_type):
            assert drift <= 1.5 * np.sqrt(n), n


@pytest.mark.any_device
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_many_dithers_at_once(model_file: ModelFile, kv_type: str) -> None:
    """More than a device's graph takes: nearly one for each of 40 cells."""
    tokens = run_of(random_ids(40, N_VOCAB), 100)
    there = [token._replace(pos=token.pos + 50) for token in tokens]
    path = model_file(ModelSpec(n_layer=1, n_head=4, n_head_kv=4, head_dim=64, seed=9))
    with (
        kvg.Model(path, device=where.device) as model,
        open_context(model, n_ctx=64, type_k="f32") as exact,
        open_context(model, n_ctx=64, type_k=kv_type) as ctx,
    ):
        true = fresh_k(exact, there)
        own = rms(fresh_k(ctx, there) - true)
        ctx.reset()
        decode(ctx, tokens)
        for i in range(1, 39):
            for delta in (10, -10):
                ctx.kv.seq_add(0, 100 + i, -1, delta)
                ctx.kv.update()
        assert len(set(ctx.kv.cells().dither[:40])) >= 38
        ctx.kv.seq_add(0, 0, -1, 50)
        assert ctx.kv.update().shifted_cells == 40
        k = ctx.kv.read_k(0)[cells_at(ctx.kv, [token.pos for token in there])]
    assert rms(k - true) <= 1.5 * np.sqrt(39) * own  # 1 to 77 rotations


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0", "q4_0"])
def test_a_hundred_with_a_state_between_them(model_file: ModelFile, kv_type: str) -> None:
    """Its dither goes with a row."""
    with kvg.Model(model_file(spec(32)), device=where.device) as model:
        for n, drift in drifts(model, (1, -1), reload=True, type_k=kv_type):
            assert drift <= 1.5 * np.sqrt(n), n


def test_a_loaded_state_is_rotated_as_the_saved_one(model_file: ModelFile) -> None:
    """The dither of what was rotated before is taken back."""
    rows = []
    with kvg.Model(model_file(spec(32)), device=where.device) as model:
        for loads in (False, True):
            with open_context(model, n_ctx=64, type_k="q4_0") as ctx:
                decode(ctx, run_of(random_ids(40, N_VOCAB), 300))
                ctx.kv.seq_add(0, 320, -1, 3)
                if loads:
                    blob = ctx.kv.save()  # which rotates
                    ctx.kv.load(blob)
                    assert sorted(ctx.kv.cells().dither[:40]) == [0] * 20 + [1] * 20
                else:
                    ctx.kv.update()
                ctx.kv.seq_add(0, 0, -1, -3)
                ctx.kv.update()
                rows.append(ctx.kv.read_k(0)[cells_at(ctx.kv, [*range(297, 317), *range(320, 340)])])
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.any_device
@pytest.mark.parametrize("kv_type", ["bf16", *QUANTIZED])
@pytest.mark.parametrize("hadamard", [False, True])
def test_only_what_is_shifted_changes(model_file: ModelFile, kv_type: str, hadamard: bool) -> None:
    """Scattered cells among others that stay, to the byte, in every layer; V stays everywhere."""
    tokens = run_of(random_ids(90, N_VOCAB))
    options = {"n_ctx": 96, "n_seq_max": 2, "type_k": kv_type, "type_v": kv_type, "hadamard": hadamard}
    with (
        kvg.Model(model_file(ModelSpec(n_head=2, n_head_kv=2, head_dim=64)), device=where.device) as model,
        open_context(model, **options) as ctx,
    ):
        decode(ctx, [token._replace(seq_ids=(int(token.pos % 3 == 1),), logits=False) for token in tokens])
        stays = contents(ctx.kv, 0)
        before = [(ctx.kv.read_k(layer), ctx.kv.read_v(layer)) for layer in range(model.n_layer)]
        for delta in (7, 5):  # the second time otherwise than the first
            ctx.kv.seq_add(1, 0, -1, delta)
            assert ctx.kv.update().shifted_cells == 30
            assert contents(ctx.kv, 0) == stays
        rotated = ctx.kv.cells().seq[:, 1]
        for layer, (k, v) in enumerate(before):
            assert np.array_equal(ctx.kv.read_v(layer), v)
            assert np.abs(ctx.kv.read_k(layer) - k)[rotated].max() > 0.1


@pytest.mark.any_device
@pytest.mark.parametrize("kv_type", ["bf16", "q8_0"])
def test_more_rows_than_the_scratch_takes_at_once(wide: kvg.Model, kv_type: str) -> None:
    """On a device 256 rows at a time as F32; every third cell stays."""
    tokens = run_of(random_ids(450, N_VOCAB))
    options = {"n_ctx": 450, "n_batch": 450, "n_seq_max": 2, "type_v": "f16"}
    ours = [token._replace(seq_ids=(int(token.pos % 3 == 0),), logits=False) for token in tokens]
    there = [token._replace(pos=token.pos + 50) for token in ours if token.seq_ids == (0,)]
    with (
        open_context(wide, **options, type_k="f32") as exact,
        open_context(wide, **options, type_k=kv_type) as ctx,
    ):
        true = fresh_k(exact, there)
        own = rms(fresh_k(ctx, there) - true)
        ctx.reset()
        decode(ctx, ours)
        before = contents(ctx.kv, 1)
        ctx.kv.seq_add(0, 0, -1, 50)
        stats = ctx.kv.update()
        done = stats.waiting_cells if where.is_cpu() and kv_type == "q8_0" else stats.shifted_cells
        assert done == 300
        assert rms(ctx.kv.read_k(0)[ctx.kv.cells().seq[:, 0]] - true) <= 1.5 * own
        assert contents(ctx.kv, 1) == before


@pytest.mark.parametrize("kv_type", ["bf16", "q8_0", "q4_1"])
def test_the_same_operations_give_the_same_bytes(model_file: ModelFile, kv_type: str) -> None:
    rows = []
    with kvg.Model(model_file(spec(32)), device=where.device) as model:
        for n_threads in (1, 2):
            with open_context(model, n_ctx=64, type_k=kv_type, n_threads_batch=n_threads) as ctx:
                decode(ctx, run_of(random_ids(40, N_VOCAB), 300))
                for _ in range(5):
                    ctx.kv.seq_add(0, 0, -1, -3)
                    ctx.kv.update()
                rows.append(ctx.kv.read_k(0))
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("how", ["defrag", "copy"])
def test_a_cell_that_moves_is_known_to_have_been_rotated(
    model_file: ModelFile, kv_type: str, how: str
) -> None:
    """Moved or copied between two updates, its K is rotated as it would have been at its old place."""
    tokens = run_of(random_ids(40, N_VOCAB), 300)
    options = {"n_ctx": 128, "n_seq_max": 2, "type_k": kv_type, "defrag_threshold": -1}
    rows = []
    with kvg.Model(model_file(spec(32)), device=where.device) as model:
        for moves in (False, True):
            with open_context(model, **options) as ctx:
                decode(ctx, tokens)
                ctx.kv.seq_add(0, 0, -1, -3)
                ctx.kv.update()
                if moves and how == "defrag":
                    ctx.kv.seq_rm(0, 300, 310)
                    ctx.kv.defrag("fill")
                    assert ctx.kv.update().moved_cells == 10
                elif moves:
                    ctx.kv.seq_cp(0, 1, -1, -1)
                ctx.kv.seq_add(0, 0, -1, -3)
                ctx.kv.update()
                rows.append(ctx.kv.read_k(0)[seen_at(ctx.kv, range(307, 334))])
    assert np.array_equal(rows[0], rows[1])


def seen_at(kv: kvg.KVCache, positions: range) -> list[int]:
    """Sequence 0's cells there."""
    cells = kv.cells()
    return [int(np.flatnonzero(cells.seq[:, 0] & (cells.pos == pos)).item()) for pos in positions]

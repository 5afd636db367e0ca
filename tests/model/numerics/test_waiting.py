"""A quantized K on the CPU that waits for a K-shift: attention rotates the queries, nothing is rounded again.

The referee is what rotary embedding is made for: only differences of positions matter. A text that waits may
differ from where it was by less than one decoded anew where it comes to, all of which is rounded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drift import rms
from support.engines import Logits, decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.kv_rows import cells_at, fresh_k, same_cells
from support.kv_types import QUANTIZED
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

ModelFile = Callable[[ModelSpec], Path]

HEADS = ModelSpec(n_layer=2, n_head=4, n_head_kv=2, head_dim=64)
LEAST = 64  # cells that wait alike, or they are rotated
N = 300
IDS = random_ids(N + 1, N_VOCAB)


@pytest.fixture(scope="module")
def model(model_file: ModelFile) -> Iterator[kvg.Model]:
    with kvg.Model(model_file(HEADS), device="cpu") as model:
        yield model


def probe(ctx: kvg.Context, n_tokens: int, seq: int = 0) -> Logits:
    return decode(ctx, run_of(IDS[-1:] * n_tokens, ctx.kv.seq_pos_max(seq) + 1, (seq,)))


@pytest.mark.parametrize("kv_type", QUANTIZED)
@pytest.mark.parametrize("hadamard", [False, True])
def test_a_shifted_text_is_the_same_text(model: kvg.Model, kv_type: str, hadamard: bool) -> None:
    """Everything moves, a hundred times."""
    options = {"n_ctx": 512, "type_k": kv_type, "type_v": kv_type, "hadamard": hadamard}
    with (
        open_context(model, **options) as still,
        open_context(model, **options) as moved,
        open_context(model, **options) as anew,
    ):
        for ctx, pos in ((still, 5000), (moved, 5000), (anew, 1900)):
            decode(ctx, run_of(IDS[:N], pos))
        for _ in range(100):
            moved.kv.seq_add(0, 0, -1, -31)
            stats = moved.kv.update()
            assert (stats.shifted_cells, stats.waiting_cells, stats.graphs) == (0, N, 0)
        assert counts(moved.kv) == {-3100: N}
        for n_tokens in (1, 40):  # whose own K is rounded anew
            expected = probe(still, n_tokens)
            assert nmse(probe(moved, n_tokens), expected) < nmse(probe(anew, n_tokens), expected)
        assert moved.kv.take_stats().shifted_cells == 0


@pytest.mark.parametrize(
    "spec",
    [
        replace(HEADS, rope_base=1e6, rope_scale=4.0),
        replace(HEADS, rope_factors=True),
        replace(HEADS, head_dim=96, n_head=6),
        replace(HEADS, n_head_kv=4),
    ],
    ids=str,
)
def test_frequencies_and_heads_as_the_model_has_them(model_file: ModelFile, spec: ModelSpec) -> None:
    options = {"n_ctx": 512, "type_k": "q4_0"}
    with (
        kvg.Model(model_file(spec), device="cpu") as model,
        open_context(model, **options) as still,
        open_context(model, **options) as moved,
        open_context(model, **options) as anew,
    ):
        for ctx, pos in ((still, 700), (moved, 700), (anew, 0)):
            decode(ctx, run_of(IDS[:N], pos))
        moved.kv.seq_add(0, 0, -1, -700)
        expected = probe(still, 1)
        assert nmse(probe(moved, 1), expected) < nmse(probe(anew, 1), expected)
        assert counts(moved.kv) == {-700: N}


@pytest.mark.parametrize("n_threads", [1, 2])
def test_parts_that_wait_for_different_shifts(model_file: ModelFile, n_threads: int) -> None:
    """Against the same tokens decoded where those come to; K of one layer knows nothing but its position."""
    options = {"n_ctx": 512, "type_k": "q8_0", "type_v": "f32", "n_threads": n_threads}
    with (
        kvg.Model(model_file(replace(HEADS, n_layer=1)), device="cpu") as model,
        open_context(model, **{**options, "type_k": "f32"}) as exact,
        open_context(model, **options) as anew,
        open_context(model, **options) as moved,
    ):
        for ctx in (exact, anew):
            decode(ctx, run_of(IDS[:N]))
        decode(moved, run_of(IDS[:90]) + run_of(IDS[90:170], 190) + run_of(IDS[170:N], 1170))
        moved.kv.seq_add(0, 190, 270, -100)
        moved.kv.seq_add(0, 1000, -1, -1000)
        assert moved.kv.update().shifted_cells == 0
        assert counts(moved.kv) == {-1000: N - 170, -100: 80}
        expected = probe(exact, 1)
        assert nmse(probe(moved, 1), expected) < 3 * nmse(probe(anew, 1), expected)


def test_few_cells_are_rotated(model: kvg.Model) -> None:
    with open_context(model, n_ctx=512, type_k="q4_0") as ctx:
        decode(ctx, run_of(IDS[:N], 1000))
        before = ctx.kv.cells()
        ctx.kv.seq_div(0, 1000, 1100, 2)  # a hundred kinds of shift
        ctx.kv.seq_add(0, 1100, 1100 + LEAST - 1, 100)
        ctx.kv.seq_add(0, 1200, 1200 + LEAST, 200)
        stats = ctx.kv.update()
        assert (stats.shifted_cells, stats.waiting_cells) == (100 + LEAST - 1, LEAST)
        assert counts(ctx.kv) == {200: LEAST}
        after = ctx.kv.cells()
        rotated = (before.pos < 1100 + LEAST - 1) & (before.pos >= 0)
        assert (after.dither == rotated).all()


def counts(kv: kvg.KVCache) -> dict[int, int]:
    """How many cells wait for each shift."""
    shifts, n = np.unique(kv.cells().shift, return_counts=True)
    return {int(shift): int(count) for shift, count in zip(shifts, n, strict=True) if shift}


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16"])
def test_floats_are_rotated(model: kvg.Model, kv_type: str) -> None:
    with open_context(model, n_ctx=512, type_k=kv_type) as ctx:
        decode(ctx, run_of(IDS[:N], 1000))
        ctx.kv.seq_add(0, 0, -1, -5)
        assert ctx.kv.update().shifted_cells == N


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_what_leaves_the_cache_is_a_rotated_copy(model: kvg.Model, kv_type: str) -> None:
    """A cell goes on waiting, its K as it was written, however often it is shifted, saved and read."""
    options = {"n_ctx": 512, "n_seq_max": 2, "type_k": kv_type}
    there = run_of(IDS[:N], 1070)
    with (
        open_context(model, **{**options, "type_k": "f32"}) as exact,
        open_context(model, **options) as other,
        open_context(model, **options) as ctx,
    ):
        true = fresh_k(exact, there)
        own = rms(fresh_k(other, there) - true)
        decode(ctx, run_of(IDS[:N], 2000))
        for _ in range(30):
            ctx.kv.seq_add(0, 0, -1, -31)
            blob = ctx.kv.save(0)
            ctx.kv.read_v(0)
            k = ctx.kv.read_k(0)[:N]
        assert ctx.kv.take_stats().shifted_cells == 0
        assert counts(ctx.kv) == {-930: N}
        assert (ctx.kv.cells().dither == 0).all()
        assert rms(k - true) < 1.05 * own  # floats: not rounded again

        other.reset()
        decode(other, run_of(IDS[:90], 0))
        other.kv.seq_add(0, 0, -1, 5)
        other.kv.load(blob, 1)
        cells = other.kv.cells()
        assert counts(other.kv) == {5: 90}
        assert (cells.dither[cells.seq[:, 1]] == 1).all()
        saved = other.kv.read_k(0)[cells_at(other.kv, range(1070, 1070 + N))]
        assert own < rms(saved - true) < 1.5 * own


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_a_hundred_beside_cells_that_wait(model_file: ModelFile, kv_type: str) -> None:
    """Dithers go round for rows that are rotated, whatever dithers the other rows carry."""
    few = run_of(random_ids(40, N_VOCAB), 1000)
    with (
        kvg.Model(model_file(replace(HEADS, n_layer=1, seed=9)), device="cpu") as model,
        open_context(model, n_ctx=512, type_k="f32") as exact,
        open_context(model, n_ctx=512, n_seq_max=2, type_k=kv_type) as ctx,
    ):
        true = fresh_k(exact, few)
        own = rms(fresh_k(ctx, few) - true)
        ctx.reset()
        decode(ctx, few)
        decode(ctx, run_of(IDS[:50], 0, (1,)) + run_of(IDS[50:100], 2000, (1,)))
        for _ in range(2):
            ctx.kv.seq_add(1, 0, 1000, 5)
            ctx.kv.seq_add(1, 2000, -1, 7)
            assert ctx.kv.update().shifted_cells == 100
        assert set(ctx.kv.cells().dither[40:140]) == {2}
        ctx.kv.seq_add(1, 0, -1, 100)
        carried: list[int] = []
        for i in range(100):
            ctx.kv.seq_add(0, 0, -1, (3, -3)[i % 2])
            assert ctx.kv.update().shifted_cells == 40
            carried += set(ctx.kv.cells().dither[:40])
        assert carried == list(range(1, 101))
        assert counts(ctx.kv) == {100: 100}
        k = ctx.kv.read_k(0)[cells_at(ctx.kv, range(1000, 1040))]
        assert rms(k - true) < 15 * own


def test_it_waits_through_a_load_of_another_sequence(model: kvg.Model) -> None:
    with open_context(model, n_ctx=512, n_seq_max=2, type_k="q4_0") as ctx:
        decode(ctx, run_of(IDS[:N], 1000) + run_of(IDS[:9], 0, (1,)))
        blob = ctx.kv.save(1)
        ctx.kv.seq_add(0, 0, -1, -5)
        ctx.kv.load(blob, 1)
        assert counts(ctx.kv) == {-5: N}


def test_cells_are_brought_together_first(model: kvg.Model) -> None:
    """Five sequences by turns, each with another shift, lie apart after a sort."""
    with open_context(model, n_ctx=512, n_seq_max=5, type_k="q4_0") as ctx:
        for begin in range(0, 100, 10):
            for seq in range(5):
                decode(ctx, run_of(IDS[begin : begin + 10], 1000 + begin, (seq,)))
        for seq in range(5):
            ctx.kv.seq_add(seq, 0, -1, -7 - seq)
        ctx.kv.defrag("sort")
        stats = ctx.kv.update()
        assert (stats.shifted_cells, stats.waiting_cells) == (0, 500)
        assert stats.moved_cells > 0


def test_it_waits_through_defrag_and_copies(model: kvg.Model) -> None:
    options = {"n_ctx": 1024, "n_seq_max": 2, "type_k": "q4_0", "type_v": "q4_0"}
    with (
        open_context(model, **options) as still,
        open_context(model, **options) as moved,
        open_context(model, **options) as anew,
    ):
        for ctx, pos in ((still, 1000), (moved, 1000), (anew, 400)):
            decode(ctx, run_of(IDS[:N], pos))
            ctx.kv.seq_rm(0, pos + 10, pos + 50)
        moved.kv.seq_add(0, 0, -1, -600)
        moved.kv.seq_cp(0, 1, -1, -1)
        for policy in ("fill", "sort"):
            moved.kv.defrag(policy)
            assert moved.kv.update().shifted_cells == 0
        moved.kv.seq_add(1, 0, -1, 100)  # which copies shared cells
        assert moved.kv.update().shifted_cells == 0
        assert counts(moved.kv) == {-600: N - 40, -500: N - 40}
        expected = probe(still, 1)
        most = nmse(probe(anew, 1), expected)
        for seq in (0, 1):
            assert nmse(probe(moved, 1, seq), expected) < most


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_copy_on_write_can_leave_too_few_cells_to_wait(model: kvg.Model, kv_type: str) -> None:
    """As KVCache.update tells: cells of all sequences count, and those that are left are rounded once."""
    there = run_of(IDS[:40], 900)
    options = {"n_ctx": 256, "n_seq_max": 2, "defrag_threshold": -1}
    with (
        open_context(model, **options, type_k="f32") as exact,
        open_context(model, **options, type_k=kv_type) as ctx,
    ):
        true = fresh_k(exact, there)
        rounding = rms(fresh_k(ctx, there) - true)
        ctx.reset()
        decode(ctx, run_of(IDS[:40], 1000, (0,)) + run_of(IDS[40:80], 1040, (1,)))
        for seq in range(2):
            ctx.kv.seq_add(seq, 0, -1, -100)
        ctx.kv.seq_cp(0, 1, 0, -1)
        assert ctx.kv.update().shifted_cells == 0
        assert counts(ctx.kv) == {-100: 80}
        ctx.kv.seq_add(1, 0, -1, 7)  # copies the 40 shared cells
        stats = ctx.kv.update()
        assert (stats.shifted_cells, stats.waiting_cells) == (40, 80)
        assert counts(ctx.kv) == {-93: 80}
        cells = ctx.kv.cells()
        assert (cells.dither[cells.seq[:, 0]] == 1).all()
        assert cells.pos[cells.seq[:, 0]].tolist() == [token.pos for token in there]
        assert rms(ctx.kv.read_k(0)[cells.seq[:, 0]] - true) < 1.5 * rounding


RANGES = st.tuples(st.sampled_from([0, 0, 30, 80, 150]), st.sampled_from([-1, -1, 90, 200]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rm"), st.integers(0, 1), RANGES, st.integers(5, 40)),
        st.tuples(st.just("add"), st.integers(0, 1), RANGES, st.integers(1, 90)),
        st.tuples(st.just("add"), st.integers(0, 1), RANGES, st.integers(-40, -1)),
        st.tuples(st.just("div"), st.integers(0, 1), RANGES, st.integers(2, 3)),
        st.tuples(st.just("read"), st.integers(0, 1), RANGES, st.integers(1, 70)),
        st.tuples(
            st.sampled_from(["copy", "fill", "sort", "update", "save"]), st.just(0), RANGES, st.just(0)
        ),
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.slow
@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_whatever_is_done_it_is_as_where_nothing_waits(model: kvg.Model, steps: list[Any]) -> None:
    """The same operations on K in F32, whose every shift rotates: the same cells, and Q8_0's logits."""
    options = {"n_ctx": 800, "n_seq_max": 2, "type_v": "f32", "defrag_threshold": -1}
    with (
        open_context(model, **options, type_k="f32") as exact,
        open_context(model, **options, type_k="q8_0") as ctx,
    ):
        for each in (exact, ctx):
            decode(each, run_of(IDS[:200], 300))
            decode(each, run_of(IDS[100:], 0, (1,)))
        for step in steps:
            outcomes = [outcome(each.kv, each, *step) for each in (exact, ctx)]
            assert outcomes[0] == outcomes[1]
            before = ctx.kv.cells().shift
            for each in (exact, ctx):
                each.kv.update()
            shift = ctx.kv.cells().shift
            assert not rotated_by_the_rule(shift).any()
            if step[0] not in ("fill", "sort"):
                assert np.array_equal(shift, np.where(rotated_by_the_rule(before), 0, before))
            for name in ("pos", "seq"):
                assert np.array_equal(getattr(ctx.kv.cells(), name), getattr(exact.kv.cells(), name))
        for seq in range(2):
            assert nmse(probe(ctx, 1, seq), probe(exact, 1, seq)) < 5e-3


def rotated_by_the_rule(shift: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Cells that may not wait: fewer than 64 in all do, or fewer than 32 in a chunk on average."""
    rotated = np.zeros(len(shift), np.bool_)
    chunks = np.arange(len(shift)) // 128
    for value in set(shift[shift != 0]):
        sizes = np.bincount(chunks[shift == value])
        order = np.argsort(-sizes, kind="stable")
        average = np.cumsum(sizes[order]) / np.arange(1, len(order) + 1)
        kept = order[average >= 32]
        if sizes[kept].sum() < LEAST:
            kept = order[:0]
        rotated |= (shift == value) & ~np.isin(chunks, kept)
    return rotated


def outcome(kv: kvg.KVCache, ctx: kvg.Context, what: str, seq: int, span: tuple[int, int], n: int) -> object:
    """What a step comes to, of an error its type."""
    try:
        match what:
            case "rm":
                kv.seq_rm(seq, span[0], span[0] + n)
            case "add":
                kv.seq_add(seq, *span, n)
            case "div":
                kv.seq_div(seq, *span, n)
            case "read":
                decode(ctx, run_of(IDS[:n], kv.seq_pos_max(seq) + 1, (seq,)))
            case "copy":
                kv.seq_rm(1, -1, -1)
                kv.seq_cp(0, 1, *span)
            case "fill" | "sort":
                kv.defrag("fill" if what == "fill" else "sort")
            case "save":
                kv.load(kv.save(seq), seq)
    except kvg.KVGraphError as error:
        return type(error)
    return kv.n_used


def test_a_failed_decode_leaves_what_waits(model: kvg.Model) -> None:
    """In its third micro-batch, after two of them were attended to."""
    options = {"n_ctx": 512, "n_ubatch": 20, "type_k": "q4_0"}
    with open_context(model, **options) as still, open_context(model, **options) as moved:
        for ctx in (still, moved):
            decode(ctx, run_of(IDS[:N], 1000))
        moved.kv.seq_add(0, 0, -1, -600)
        moved.kv.update()
        before = moved.kv.cells()
        with fault("compute", 3), pytest.raises(kvg.DeviceError):
            decode(moved, run_of(IDS[:60], 700))
        assert same_cells(moved.kv.cells(), before)
        assert nmse(probe(moved, 1), probe(still, 1)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("n_ubatch", [1, 7, 512])
def test_long_texts_with_holes(model: kvg.Model, n_ubatch: int) -> None:
    """More cells than one thread takes of a token, new ones among those that wait, clear() and again."""
    n = 1400
    ids = random_ids(n, N_VOCAB, 3)
    options = {"n_ctx": 1500, "n_batch": 1500, "n_threads": 2, "n_threads_batch": 2, "defrag_threshold": -1}
    with (
        open_context(model, **options, type_k="f32") as exact,
        open_context(model, **options, type_k="q8_0", n_ubatch=n_ubatch) as ctx,
    ):
        for each in (exact, ctx) * 2:
            each.kv.clear()
            decode(each, [token._replace(logits=False) for token in run_of(ids)])
            for p0, p1 in ((100, 130), (700, 720), (1200, 1201)):
                each.kv.seq_rm(0, p0, p1)
            each.kv.seq_add(0, 1201, -1, -1)
            each.kv.seq_add(0, 130, -1, -30)
        for n_tokens in (60, 1):
            assert nmse(probe(ctx, n_tokens), probe(exact, n_tokens)) < 1e-3
        assert counts(ctx.kv) == {-30: 1200 - 130 - 20, -31: n - 1201}


def test_ggmls_attention_reads_what_was_rotated(model: kvg.Model) -> None:
    with open_context(model, n_ctx=512, type_k="q4_0", flash_attn="on") as ctx:
        decode(ctx, run_of(IDS[:N], 1000))
        ctx.kv.seq_add(0, 0, -1, -5)
        assert ctx.kv.update().shifted_cells == N


def test_what_waits_is_told(model: kvg.Model) -> None:
    with open_context(model, n_ctx=512, type_k="q4_0") as ctx:
        decode(ctx, run_of(IDS[:N], 1000))
        ctx.kv.seq_add(0, 0, -1, -5)
        probe(ctx, 1)
        stats = ctx.kv.take_stats()
        assert (stats.shifted_cells, stats.waiting_cells) == (0, N)
        assert str(stats).startswith(f"0 cells shifted, {N} waiting, 0 moved, ")

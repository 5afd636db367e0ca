"""Defrag "fill": as few moves as there can be, and every sequence keeps what it saw, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import where
from support.engines import Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import contents
from support.kv_types import KV_TYPES, row_bytes
from support.models import N_VOCAB

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

Holder = Callable[[tuple[str, str]], kvg.Model]
Punch = Callable[[kvg.KVCache], None]  # makes the holes


def used_cells(kv: kvg.KVCache) -> list[int]:
    return [int(i) for i in np.flatnonzero(kv.cells().pos >= 0)]


def fill(ctx: kvg.Context, n_tokens: int, n_seq: int) -> None:
    """Tokens of n_seq sequences, cell by cell in turn, the first sixteen shared by all of them."""
    ids = random_ids(n_tokens, N_VOCAB)
    everyone = tuple(range(n_seq))
    decode(ctx, run_of(ids[:16], 0, everyone))
    decode(ctx, [Token(ids[i], i, (i % n_seq,), logits=False) for i in range(16, n_tokens)])


def check_defrag(
    model: kvg.Model, n_tokens: int, n_seq: int, kv_types: tuple[str, str], punch: Punch
) -> None:
    """Makes holes in two equal caches, compacts one of them, and compares everything.

    With attention as it is by default: ggml's flash (flash_attn="on") adds up F16 values in F16,
    and there the order of the cells shows.
    """
    type_k, type_v = kv_types
    options: dict[str, int | str] = {"n_ctx": 512, "n_seq_max": n_seq, "defrag_threshold": -1}
    options |= {"type_k": type_k, "type_v": type_v}
    with open_context(model, **options) as ctx, open_context(model, **options) as untouched:
        for each in (ctx, untouched):
            fill(each, n_tokens, n_seq)
            punch(each.kv)
        kv = ctx.kv
        before = [contents(kv, seq) for seq in range(n_seq)]
        n_used, misplaced = kv.n_used, [i for i in used_cells(kv) if i >= kv.n_used]
        width = model.n_head_kv * model.head_dim
        layer_bytes = row_bytes(type_k, width) + row_bytes(type_v, width)

        kv.defrag("fill")
        stats = kv.update()

        assert stats.moved_cells == len(misplaced)
        assert stats.moved_bytes == len(misplaced) * model.n_layer * layer_bytes
        assert (stats.graphs > 0) == bool(misplaced)
        assert stats.shifted_cells == 0
        assert (kv.n_used, kv.n_kv) == (n_used, n_used)
        assert used_cells(kv) == list(range(n_used))
        assert [contents(kv, seq) for seq in range(n_seq)] == before
        following = [Token(7 + seq, kv.seq_pos_max(seq) + 1, (seq,)) for seq in range(n_seq)]
        if n_used:
            assert nmse(decode(ctx, following), decode(untouched, following)) <= where.limit(1e-6)


def remove_cells(kv: kvg.KVCache, cells: Sequence[int]) -> None:
    """Punches holes: the positions that these cells hold are taken from every sequence."""
    pos = kv.cells().pos
    for i in cells:
        if pos[i] >= 0:
            kv.seq_rm(-1, int(pos[i]), int(pos[i]) + 1)


@pytest.mark.parametrize("kv_types", KV_TYPES, ids="-".join)
@pytest.mark.parametrize(("begin", "end"), [(0, 200), (60, 61), (16, 250), (299, 300), (280, 300), (0, 300)])
def test_one_long_hole(holder: Holder, begin: int, end: int, kv_types: tuple[str, str]) -> None:
    check_defrag(holder(kv_types), 300, 1, kv_types, lambda kv: kv.seq_rm(0, begin, end))


@pytest.mark.parametrize("kv_types", KV_TYPES, ids="-".join)
@pytest.mark.parametrize("stride", [2, 3, 7])
def test_holes_of_one_cell(holder: Holder, stride: int, kv_types: tuple[str, str]) -> None:
    """Every stride-th cell goes, too many of them to move each by a node of its own."""
    check_defrag(holder(kv_types), 500, 2, kv_types, lambda kv: remove_cells(kv, range(0, 500, stride)))


@pytest.mark.parametrize("kv_types", KV_TYPES, ids="-".join)
def test_several_long_runs(holder: Holder, kv_types: tuple[str, str]) -> None:
    """Three holes, and used runs that fit none of them in one piece."""
    holes = [*range(20, 60), *range(100, 150), *range(200, 290)]
    check_defrag(holder(kv_types), 480, 3, kv_types, lambda kv: remove_cells(kv, holes))


@settings(max_examples=where.examples(40))
@given(
    n_tokens=st.integers(17, 200),
    n_seq=st.integers(1, 4),
    kv_types=st.sampled_from(KV_TYPES),
    runs=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=12),
    keep=st.none() | st.integers(0, 3),
)
def test_random_holes(
    holder: Holder,
    n_tokens: int,
    n_seq: int,
    kv_types: tuple[str, str],
    runs: list[tuple[int, int]],
    keep: int | None,
) -> None:
    def punch(kv: kvg.KVCache) -> None:
        remove_cells(kv, [i for begin, n in runs for i in range(begin, min(begin + n, n_tokens))])
        if keep is not None and keep < n_seq:
            kv.seq_rm(keep, 3, 60)

    check_defrag(holder(kv_types), n_tokens, n_seq, kv_types, punch)


def test_flash_attention_after_defrag(small: kvg.Model) -> None:
    """The order of the cells may cost as much as flash itself costs against plain attention."""
    rows = {}
    for flash_attn, compact in (("off", False), ("on", False), ("on", True)):
        with open_context(small, n_ctx=512, defrag_threshold=-1, flash_attn=flash_attn) as ctx:
            fill(ctx, 400, 1)
            remove_cells(ctx.kv, range(0, 400, 2))
            if compact:
                ctx.kv.defrag("fill")
            rows[flash_attn, compact] = decode(ctx, [Token(7, 400)])
            assert (ctx.kv.n_kv == ctx.kv.n_used) == compact
    allowed = where.limit(max(1e-6, 2 * nmse(rows["on", False], rows["off", False])))
    assert nmse(rows["on", True], rows["on", False]) <= allowed


def test_shift_and_defrag_in_one_update(small: kvg.Model) -> None:
    """Each cell takes its own rotated K along."""
    with (
        open_context(small, n_ctx=128, type_k="f32") as ctx,
        open_context(small, n_ctx=128, type_k="f32") as apart,
    ):
        for each in (ctx, apart):
            decode(each, run_of(random_ids(100, N_VOCAB)))
            remove_cells(each.kv, range(10, 60, 2))
            each.kv.seq_add(0, 50, -1, -20)
        apart.kv.update()
        expected = contents(apart.kv, 0)
        ctx.kv.defrag("fill")
        stats = ctx.kv.update()
        assert stats.shifted_cells > 0
        assert stats.moved_cells > 0
        assert contents(ctx.kv, 0) == expected


def test_nothing_moves_in_a_compact_cache(small: kvg.Model) -> None:
    with open_context(small, n_ctx=128) as ctx:
        ctx.kv.defrag("fill")
        assert ctx.kv.update().graphs == 0  # an empty one
        decode(ctx, run_of(random_ids(60, N_VOCAB)))
        ctx.kv.seq_rm(0, 50, -1)  # a tail is no hole
        before = ctx.kv.cells()
        ctx.kv.defrag("fill")
        stats = ctx.kv.update()
        assert (stats.moved_cells, stats.moved_bytes, stats.graphs) == (0, 0, 0)
        assert np.array_equal(ctx.kv.cells().pos, before.pos)


def test_defrag_waits_for_update_and_happens_once(small: kvg.Model) -> None:
    with open_context(small, n_ctx=128, defrag_threshold=-1) as ctx:
        decode(ctx, run_of(random_ids(60, N_VOCAB)))
        ctx.kv.seq_rm(0, 10, 20)
        assert ctx.kv.update().moved_cells == 0  # nobody asked
        ctx.kv.defrag("fill")
        assert ctx.kv.n_kv == 60
        assert ctx.kv.update().moved_cells == 10
        ctx.kv.seq_rm(0, 20, 30)
        assert ctx.kv.update().moved_cells == 0  # not asked again
        ctx.kv.defrag("fill")
        decode(ctx, [Token(5, 60)])
        assert (ctx.kv.n_used, ctx.kv.n_kv) == (41, 41)


@pytest.mark.parametrize(
    ("options", "n_holes", "compacts"),
    [
        ({}, 10, False),  # a tenth: reached, not passed
        ({}, 11, True),
        ({"defrag_threshold": 0.5}, 50, False),
        ({"defrag_threshold": 0.5}, 51, True),
        ({"defrag_threshold": 0.0}, 1, True),
        ({"defrag_threshold": -1.0}, 90, False),
    ],
)
def test_decode_compacts_past_the_threshold(
    small: kvg.Model, options: dict[str, float], n_holes: int, compacts: bool
) -> None:
    with open_context(small, n_ctx=256, **options) as ctx:
        decode(ctx, run_of(random_ids(100, N_VOCAB)))
        ctx.kv.seq_rm(0, 5, 5 + n_holes)
        assert ctx.kv.n_kv == 100
        decode(ctx, [Token(5, 100)])
        assert ctx.kv.n_used == 101 - n_holes
        assert (ctx.kv.n_kv == ctx.kv.n_used) == compacts


@pytest.mark.parametrize("policy", ["", "FILL", "best", None, 0])
def test_unknown_policy(small: kvg.Model, policy: object) -> None:
    with open_context(small, n_ctx=64) as ctx, pytest.raises(kvg.InvalidArgumentError):
        ctx.kv.defrag(policy)  # type: ignore[arg-type]

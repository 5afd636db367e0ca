"""Window groups that reuse cells: what is lost, what isn't, and what is refused because of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from support import where
from support.engines import OurEngine, Token, decode, open_context, prompt_then_singles, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.kv_rows import same_cells
from support.models import N_VOCAB, WINDOW

import pykvgraph as kvg
from pykvgraph._native.library import lib

pytestmark = pytest.mark.any_device

W, N_BATCH = WINDOW, 12
IDS = random_ids(200, N_VOCAB)
OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": N_BATCH,
    "n_ubatch": 5,
    "type_k": "f32",
    "type_v": "f32",
    "defrag_threshold": -1,
}
FULL, WINDOW = 0, 1  # groups of `mixed`


def fill(ctx: kvg.Context, n: int, seq: int = 0, n_batch: int = N_BATCH) -> None:
    """The first n tokens of IDS, in batches."""
    for begin in range(0, n, n_batch):
        decode(ctx, run_of(IDS[begin : min(begin + n_batch, n)], begin, (seq,)))


def positions(ctx: kvg.Context, group: int, seq: int = 0) -> list[int]:
    view = ctx.kv.cells(group)
    return sorted(view.pos[view.seq[:, seq]].tolist())


def all_cells(ctx: kvg.Context) -> list[kvg.CellsView]:
    return [ctx.kv.cells(group) for group in range(len(ctx.kv.groups))]


def unchanged(ctx: kvg.Context, before: list[kvg.CellsView]) -> bool:
    return all(same_cells(ctx.kv.cells(group), view) for group, view in enumerate(before))


@pytest.mark.parametrize(
    ("options", "n_cells"),
    [
        ({}, W + N_BATCH),
        ({"n_seq_max": 3, "checkpoint_cells": 10}, 3 * W + N_BATCH + 10),
        ({"n_ctx": 15}, 15),
        ({"swa_full": True, "n_seq_max": 3}, 256),
    ],
)
def test_how_many_cells_there_are(mixed: kvg.Model, options: dict[str, Any], n_cells: int) -> None:
    with open_context(mixed, **{**OPTIONS, **options}) as ctx:
        assert [group.n_cells for group in ctx.kv.groups] == [ctx.n_ctx, n_cells]
        assert ctx.kv.n_cells == ctx.kv.n_free == ctx.n_ctx
        rows = sum(-(-group.n_cells // 256) * 256 for group in ctx.kv.groups)
        assert ctx.kv.bytes == rows * 2 * 16 * (4 + 4)


@pytest.mark.parametrize("n_batch", [1, 7, N_BATCH])
def test_a_long_text_is_as_with_all_cells(mixed: kvg.Model, n_batch: int) -> None:
    ids = IDS if where.is_cpu() else IDS[:60]
    with open_context(mixed, **OPTIONS) as ctx, open_context(mixed, **OPTIONS, swa_full=True) as full:
        for begin in range(0, len(ids), n_batch):
            tokens = run_of(ids[begin : begin + n_batch], begin)
            assert nmse(decode(ctx, tokens), decode(full, tokens)) <= where.rule(1e-6)
        assert ctx.kv.groups[WINDOW].n_used == W + N_BATCH
        assert full.kv.groups[WINDOW].n_used == len(ids)
        assert ctx.kv.seq_pos_min(0) == len(ids) - W - N_BATCH
        assert (full.kv.seq_pos_min(0), ctx.kv.seq_pos_max(0)) == (0, len(ids) - 1)
        assert ctx.kv.n_free == 256 - len(ids)


def test_a_model_of_windows_alone_never_is_full(windowed: kvg.Model) -> None:
    with open_context(windowed, **{**OPTIONS, "n_ctx": 24}) as ctx:
        with open_context(windowed, **OPTIONS) as fresh:
            fill(ctx, 150)
            expected = decode(fresh, run_of(IDS[200 - W - 50 : 150], 200 - W - 50))[-1:]
            ctx.kv.seq_rm(0, 149, -1)
            assert nmse(decode(ctx, run_of(IDS[149:150], 149)), expected) <= where.rule(1e-6)
        assert ctx.kv.n_free >= N_BATCH


def test_what_a_call_leaves_behind_stays_until_the_next(mixed: kvg.Model) -> None:
    """So that it can be undone, whatever its size."""
    with open_context(mixed, **OPTIONS) as ctx, open_context(mixed, **OPTIONS) as other:
        for each in (ctx, other):
            fill(each, 36)
        tokens = run_of(IDS[36:48], 36)
        expected = decode(other, tokens)
        for undo in (partial(lib().kvg_undo_decode), lambda c: lib().kvg_kv_seq_rm(c, 0, 36, -1)):
            decode(ctx, run_of(random_ids(N_BATCH, N_VOCAB, 5), 36))
            ctx._handle.call(undo)
            assert ctx.kv.seq_pos_max(0) == 35
        assert nmse(decode(ctx, tokens), expected) <= where.rule(1e-6)


def test_going_back_as_far_as_the_window_reaches(mixed: kvg.Model) -> None:
    with open_context(mixed, **OPTIONS) as ctx, open_context(mixed, **OPTIONS, swa_full=True) as full:
        for each in (ctx, full):
            fill(each, 48)
        lost = ctx.kv.seq_pos_min(0) - 1
        assert lost == 48 - W - N_BATCH - 1
        before = all_cells(ctx)
        for seq in (0, -1):
            with pytest.raises(kvg.InvalidArgumentError, match=f"lost those up to {lost}.* {lost + W}"):
                ctx.kv.seq_rm(seq, lost + W - 1, -1)
        assert unchanged(ctx, before)
        for each in (ctx, full):
            each.kv.seq_rm(0, lost + W, -1)
        tokens = run_of(IDS[150:160], lost + W)
        assert nmse(decode(ctx, tokens), decode(full, tokens)) <= where.rule(1e-6)
        ctx.kv.seq_rm(0, 0, -1)  # all of it: nothing is lost then
        fill(ctx, 30)
        assert ctx.kv.seq_pos_max(0) == 29


def test_holes_lose_nothing(mixed: kvg.Model) -> None:
    """What is removed in the middle is not missing; a token before what is lost can't be decoded."""
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 100)
        ctx.kv.seq_rm(0, 10, 30)
        ctx.kv.seq_rm(0, 90, 95)
        assert ctx.kv.seq_pos_max(0) == 99
        decode(ctx, [Token(5, 300)])
        ctx.kv.seq_rm(0, 300, -1)
        decode(ctx, [Token(5, 100)])


def test_a_sequence_that_ended_has_lost_nothing(mixed: kvg.Model) -> None:
    """Also when it ended by removing all that it had, and not everything there might have been."""
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 100)
        ctx.kv.seq_rm(0, 0, 5)
        ctx.kv.seq_rm(0, 5, -1)
        fill(ctx, 30)
        ctx.kv.seq_keep(0)
        assert ctx.kv.seq_pos_max(0) == 29


@pytest.mark.parametrize("n_keep", [0, 4])
@pytest.mark.parametrize("alone", [False, True])
def test_a_context_shift(mixed: kvg.Model, windowed: kvg.Model, n_keep: int, alone: bool) -> None:
    """The lost positions move with those after them, also where no other group has them (alone)."""
    model = windowed if alone else mixed
    shift = kvg.ContextShift(n_keep=n_keep)
    with open_context(model, **OPTIONS) as ctx, open_context(model, **OPTIONS, swa_full=True) as full:
        for each in (ctx, full):
            fill(each, 60)
            shift.apply(each.kv)
            assert each.kv.seq_pos_max(0) == 60 - (60 - n_keep) // 2 - 1
        pos = ctx.kv.seq_pos_max(0) + 1
        tokens = run_of(IDS[150:160], pos)
        assert nmse(decode(ctx, tokens), decode(full, tokens)) <= where.rule(1e-6)


def test_shifts_that_would_need_what_is_lost(mixed: kvg.Model) -> None:
    with open_context(mixed, **OPTIONS) as ctx, open_context(mixed, **OPTIONS, swa_full=True) as full:
        for each in (ctx, full):
            fill(each, 60)
        lost = ctx.kv.seq_pos_min(0) - 1
        before = all_cells(ctx)
        for call in (
            partial(ctx.kv.seq_div, 0, 0, -1, 10),
            partial(ctx.kv.seq_div, 0, lost + 1, -1, 10),
            partial(ctx.kv.seq_add, 0, lost + 1, -1, -(60 - W) + 2),
            partial(ctx.kv.seq_add, 0, 10, 20, 40),  # what is lost among others, into the window
            partial(kvg.ContextShift(n_keep=lost, n_discard=15).apply, ctx.kv),
        ):
            with pytest.raises(kvg.UnsupportedError, match="swa_full=True"):
                call()
            assert unchanged(ctx, before)
        full.kv.seq_div(0, 0, -1, 10)
        ctx.kv.seq_add(0, 0, -1, 100)
        ctx.kv.seq_add(0, 0, -1, -100)
        assert unchanged(ctx, before)


def test_self_extend_goes_on(mixed: kvg.Model) -> None:
    """Two tokens at each position: a window of 8 positions needs 16 cells."""
    options = {**OPTIONS, "checkpoint_cells": W}
    with open_context(mixed, **options) as ctx, open_context(mixed, **OPTIONS, swa_full=True) as full:
        for each in (ctx, full):
            pos = 0
            for begin in range(0, 60, N_BATCH):
                decode(each, run_of(IDS[begin : begin + N_BATCH], pos))
                pos = kvg.self_extend(each.kv, 0, pos, pos + N_BATCH, 2)
        tokens = run_of(IDS[120:130], ctx.kv.seq_pos_max(0) + 1)
        assert ctx.kv.seq_pos_min(0) > full.kv.seq_pos_min(0)
        assert nmse(decode(ctx, tokens), decode(full, tokens)) <= where.rule(1e-6)


def test_a_copied_sequence_has_lost_as_much(mixed: kvg.Model) -> None:
    options = {**OPTIONS, "n_seq_max": 2, "n_ctx": 300}
    with open_context(mixed, **options) as ctx, open_context(mixed, **options, swa_full=True) as full:
        for each in (ctx, full):
            fill(each, 48)
            each.kv.seq_cp(0, 1, 0, -1)
        assert ctx.kv.seq_pos_min(1) == ctx.kv.seq_pos_min(0) > 0
        with pytest.raises(kvg.InvalidArgumentError, match="lost"):
            ctx.kv.seq_rm(1, 20, -1)
        for each in (ctx, full):  # one goes on and the other keeps its window
            for i in range(30):
                decode(each, [Token(IDS[i], 48 + i, (0,))])
            each.kv.seq_add(1, 0, -1, 5)
        assert positions(ctx, WINDOW, 1)[-W:] == list(range(53 - W, 53))
        tokens = run_of(IDS[150:160], 53, (1,))
        assert nmse(decode(ctx, tokens), decode(full, tokens)) <= where.rule(1e-6)


def test_a_shift_copies_no_cell_that_the_other_sequence_then_loses(mixed: kvg.Model) -> None:
    """Room for the copies comes from cells that sequence 1 has left behind: it loses those that it shared."""
    with open_context(mixed, **OPTIONS | {"n_seq_max": 2}) as ctx:
        fill(ctx, W + 1)
        ctx.kv.seq_cp(0, 1, 0, -1)
        decode(ctx, run_of(IDS[:9], W + 1, (1,)))
        decode(ctx, run_of(IDS[:9], W + 10, (1,)))
        before = ctx.kv.cells(WINDOW).seq[:, 0]
        ctx.kv.seq_rm(0, 0, 1)
        ctx.kv.seq_add(0, 1, -1, -1)
        after = ctx.kv.cells(WINDOW)
        assert np.array_equal(np.flatnonzero(after.seq[:, 0]), np.flatnonzero(before)[1:])
        assert positions(ctx, WINDOW) == list(range(W))
        assert ctx.kv._lost(WINDOW, 1) >= W


def test_a_copy_of_nothing_has_lost_nothing(mixed: kvg.Model) -> None:
    """Although its source has. And a part that ends in a gap has lost no position that it never had."""
    with open_context(mixed, **OPTIONS | {"n_seq_max": 3}) as ctx:
        decode(ctx, run_of(IDS[:12], 40))
        decode(ctx, run_of(IDS[:4], 80))
        for pos in range(84, 200, 4):
            decode(ctx, run_of(IDS[:4], pos))
        assert ctx.kv._lost(WINDOW, 0) > 80
        ctx.kv.seq_cp(0, 1, 0, 20)
        decode(ctx, run_of(IDS[:4], 0, (1,)))
        ctx.kv.seq_cp(0, 2, 0, 70)
        assert ctx.kv._lost(WINDOW, 2) == ctx.kv.seq_pos_max(2) == 51
        decode(ctx, run_of(IDS[:4], 51 + W, (2,)))


def test_a_part_that_is_copied_can_only_be_gone_on_with_where_it_is_whole(mixed: kvg.Model) -> None:
    with open_context(mixed, **{**OPTIONS, "n_seq_max": 2}) as ctx:
        fill(ctx, 100)
        ctx.kv.seq_cp(0, 1, 0, 50)
        assert ctx.kv.seq_pos_max(1) == 49
        with pytest.raises(kvg.InvalidArgumentError, match="sequence 1 can't go on at position 50"):
            decode(ctx, [Token(5, 50, (1,))])
        decode(ctx, [Token(5, 50 + W, (1,))])  # a gap: the window is empty, and nothing of it is lost


@pytest.mark.parametrize("site", ["cells", "build", "alloc", "compute"])
def test_a_fault_leaves_what_can_be_attended(mixed: kvg.Model, site: str) -> None:
    tokens = run_of(IDS[40:52], 40)
    with open_context(mixed, **OPTIONS) as fresh:
        fill(fresh, 40)
        expected = decode(fresh, tokens)
    for countdown in range(1, 10):
        with open_context(mixed, **OPTIONS) as ctx:
            fill(ctx, 40)
            before, seen = ctx.kv.cells(FULL), positions(ctx, WINDOW)[-W:]
            with fault(site, countdown):
                try:
                    decode(ctx, tokens)
                    break
                except kvg.DeviceError:
                    pass
            assert same_cells(ctx.kv.cells(FULL), before)
            assert positions(ctx, WINDOW)[-W:] == seen == list(range(40 - W, 40))
            assert nmse(decode(ctx, tokens), expected) <= where.rule(1e-6)
    assert countdown > 1 or site in ("build", "alloc")  # the CPU has the graph already


@pytest.mark.parametrize("whole", [True, False])
def test_saved_and_loaded(mixed: kvg.Model, whole: bool) -> None:
    options = {**OPTIONS, "n_seq_max": 2}
    seq = None if whole else 0
    tokens = run_of(IDS[100:110], 100)
    with open_context(mixed, **options) as ctx, open_context(mixed, **options) as other:
        fill(ctx, 100)
        blob = ctx.kv.save(seq)
        fill(other, 40)
        other.kv.load(blob, seq)
        assert other.kv.seq_pos_min(0) == ctx.kv.seq_pos_min(0)
        with pytest.raises(kvg.InvalidArgumentError, match="lost"):
            other.kv.seq_rm(0, 50, -1)
        assert nmse(decode(other, tokens), decode(ctx, tokens)) <= where.rule(1e-6)
    with open_context(mixed, **options, swa_full=True) as full:  # has room for more, and has no more
        full.kv.load(blob, seq)
        with pytest.raises(kvg.InvalidArgumentError, match="lost"):
            full.kv.seq_rm(0, 50, -1)


def test_an_attached_prefix_has_no_window(mixed: kvg.Model) -> None:
    """Full cells are kept; those of windows are not: the sequence goes on where it needs none of them."""
    with open_context(mixed, **{**OPTIONS, "n_seq_max": 2}) as ctx:
        fill(ctx, 40)
        hold = ctx.kv.hold(0, 0, 30)
        assert ctx.kv.cells(FULL).held.sum() == 30
        assert ctx.kv.cells(WINDOW).held.sum() == 0
        ctx.kv.attach(hold, 1)
        assert (ctx.kv.seq_pos_max(1), ctx.kv.seq_pos_min(1)) == (29, 30)
        with pytest.raises(kvg.InvalidArgumentError, match="lost those up to 29"):
            decode(ctx, [Token(5, 30, (1,))])
        ctx.kv.seq_rm(1, 0, -1)
        decode(ctx, [Token(5, 0, (1,))])
        hold.release()


def test_sequences_beside_each_other(mixed: kvg.Model) -> None:
    """Each keeps its window while others take what they have left behind."""
    options = {**OPTIONS, "n_seq_max": 3}
    with open_context(mixed, **options) as ctx, open_context(mixed, **options, swa_full=True) as full:
        rng = np.random.default_rng(1)
        for _ in range(60 if where.is_cpu() else 30):
            seq, n = int(rng.integers(3)), int(rng.integers(1, N_BATCH + 1))
            n = min(n, ctx.kv.n_free)
            if n == 0 or ctx.kv.seq_pos_max(seq) > 70:
                for each in (ctx, full):
                    each.kv.seq_rm(seq, 0, -1)
                continue
            tokens = run_of(rng.integers(3, N_VOCAB, n), ctx.kv.seq_pos_max(seq) + 1, (seq,))
            assert nmse(decode(ctx, tokens), decode(full, tokens)) <= where.rule(1e-6)
        assert ctx.kv.groups[WINDOW].n_used == 3 * W + N_BATCH


def test_one_by_one_and_at_once(mixed: kvg.Model) -> None:
    with open_context(mixed, **{**OPTIONS, "n_batch": 60}) as ctx, open_context(mixed, **OPTIONS) as other:
        singles = prompt_then_singles(OurEngine(other), IDS[:60], N_BATCH)
        assert nmse(singles, decode(ctx, run_of(IDS[:60]))) <= where.rule(1e-6)

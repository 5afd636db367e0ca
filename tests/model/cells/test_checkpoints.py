"""Checkpoints and resume points: what windows need to go on at a position is kept, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from support import where
from support.engines import decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

W, N_BATCH, WINDOW = 8, 12, 1  # WINDOW: the group
IDS = random_ids(200, N_VOCAB)
OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": N_BATCH,
    "n_seq_max": 2,
    "checkpoint_cells": 2 * W,
    "type_k": "f32",
    "type_v": "f32",
    "defrag_threshold": -1,
}


@pytest.fixture(scope="module")
def mixed(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """Two layers, of which the first sees 8 positions and the second all."""
    with fault("window", W):  # while it is loaded
        model = kvg.Model(model_file(SMALL), device=where.device)
    with model:
        yield model


def fill(ctx: kvg.Context, n: int, seq: int = 0) -> None:
    """The sequence goes on with IDS up to position n - 1."""
    begin = ctx.kv.seq_pos_max(seq) + 1
    for pos in range(begin, n, N_BATCH):
        decode(ctx, run_of(IDS[pos : min(pos + N_BATCH, n)], pos, (seq,)))


def go_on(ctx: kvg.Context, pos: int, seq: int = 0) -> Any:
    return decode(ctx, run_of(IDS[150:160], pos, (seq,)))


def expected(model: kvg.Model, n: int) -> Any:
    with open_context(model, **OPTIONS, swa_full=True) as full:
        fill(full, n)
        return go_on(full, n)


@pytest.mark.parametrize("policy", [None, "fill", "sort"])
def test_coming_back_to_a_checkpoint(mixed: kvg.Model, policy: Literal["fill", "sort"] | None) -> None:
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 40)
        assert ctx.kv.checkpoint(0) == 40
        fill(ctx, 70)
        assert ctx.kv.checkpoint(0) == 70
        fill(ctx, 140)
        assert ctx.kv.checkpoints(0) == [40, 70]
        assert ctx.kv.cells(WINDOW).held.sum() == 2 * W
        with pytest.raises(kvg.InvalidArgumentError, match=r"are 40 \(a checkpoint, for kv.rewind\) and"):
            ctx.kv.seq_rm(0, 60, -1)
        if policy:
            ctx.kv.defrag(policy)
            ctx.kv.update()
        for wanted, there in ((139, 139), (75, 70), (70, 70), (60, 40)):
            assert ctx.kv.rewind(0, wanted) == there
            assert ctx.kv.seq_pos_max(0) == there - 1
            assert nmse(go_on(ctx, there), expected(mixed, there)) <= where.rule(1e-6)
            ctx.kv.rewind(0, there)
        assert ctx.kv.checkpoints(0) == [40]
        assert ctx.kv.rewind(0, 39) == 39  # the window reaches from 40 back to here
        assert ctx.kv.rewind(0, 20) == 0
        assert (ctx.kv.checkpoints(0), ctx.kv.seq_pos_max(0)) == ([], -1)
        assert ctx.kv.n_used == ctx.kv.groups[WINDOW].n_used == 0


def test_going_nowhere(mixed: kvg.Model) -> None:
    with open_context(mixed, **OPTIONS) as ctx:
        for call in (ctx.kv.checkpoint, ctx.kv.resume_point):
            for seq in (0, 2, -1, 2**70):
                with pytest.raises(kvg.InvalidArgumentError):
                    call(seq)
        fill(ctx, 20)
        assert ctx.kv.rewind(0, 2**40) == 20
        assert ctx.kv.rewind(0, -5) == 0
        for seq in (2, -1):
            with pytest.raises(kvg.InvalidArgumentError):
                ctx.kv.rewind(seq, 0)
            with pytest.raises(kvg.InvalidArgumentError):
                ctx.kv.checkpoints(seq)


def test_checkpoints_give_way(mixed: kvg.Model) -> None:
    """Before a decode has no room: first the one that is nearest to another."""
    with open_context(mixed, **{**OPTIONS, "checkpoint_cells": 0}) as ctx:
        for n in (40, 80, 84, 120):
            fill(ctx, n)
            ctx.kv.checkpoint(0)
        fill(ctx, 130)
        kept = ctx.kv.checkpoints(0)
        assert set(kept) < {40, 80, 84, 120}
        assert not {80, 84} <= set(kept)
        fill(ctx, 50, 1)
        fill(ctx, 200)
        fill(ctx, 56, 1)
        assert len(ctx.kv.checkpoints(0)) <= 1
        assert ctx.kv.seq_pos_max(0) == 199


def test_what_spoils_a_checkpoint(mixed: kvg.Model) -> None:
    with open_context(mixed, **{**OPTIONS, "checkpoint_cells": 4 * W}) as ctx:
        for n in (40, 60, 80):
            fill(ctx, n)
            ctx.kv.checkpoint(0)
        fill(ctx, 120)
        for p0, p1 in ((60, 60), (60, 50), (0, 1)):  # where nothing moves, nothing is spoilt
            ctx.kv.seq_div(0, p0, p1, 4)
            ctx.kv.seq_add(0, p0, p0, 9)
            assert ctx.kv.checkpoints(0) == [40, 60, 80]
        for p0, p1, left in ((45, 50, [40, 60, 80]), (50, 60, [40, 60, 80]), (79, 82, [40, 60])):
            ctx.kv.seq_rm(0, p0, p1)
            assert ctx.kv.checkpoints(0) == left
        ctx.kv.seq_add(0, 50, -1, -10)  # the window at 50 would reach back to what is lost
        assert ctx.kv.checkpoints(0) == [40]
        ctx.kv.seq_add(0, 45, -1, 0)
        ctx.kv.seq_keep(0)
        assert ctx.kv.checkpoints(0) == [40]
        ctx.kv.seq_div(0, 39, -1, 2)
        assert ctx.kv.checkpoints(0) == []
        ctx.kv.checkpoint(0)
        ctx.kv.seq_keep(1)
        assert ctx.kv.checkpoints(0) == []
        assert not ctx.kv.cells(WINDOW).held.any()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("n_keep", [0, 5])
def test_checkpoints_move_with_a_context_shift(mixed: kvg.Model, n_keep: int, shared: bool) -> None:
    """shared: another sequence sees the cells, and keeps them where they are."""
    options = {**OPTIONS, "checkpoint_cells": 6 * W}
    with open_context(mixed, **options) as ctx, open_context(mixed, **options, swa_full=True) as full:
        for each in (ctx, full):
            for n in (20, 60, 80):
                fill(each, n)
                each.kv.checkpoint(0)
                if shared and n == 80:
                    each.kv.seq_cp(0, 1, 0, -1)
            fill(each, 100)
            each.kv.seq_rm(0, n_keep, 30)
            each.kv.seq_add(0, 30, -1, n_keep - 30)
            assert each.kv.checkpoints(0) == [30 + n_keep, 50 + n_keep]
            fill(each, 120)
        held = ctx.kv.cells(WINDOW)
        assert sorted(held.pos[held.held > 0]) == [p + n_keep for p in (*range(22, 30), *range(42, 50))]
        for there in (50 + n_keep, 30 + n_keep):
            for each in (ctx, full):
                each.kv.seq_rm(0, there, -1)
            assert nmse(go_on(ctx, there), go_on(full, there)) <= where.rule(1e-6)
        if shared:
            assert nmse(go_on(ctx, 80, 1), go_on(full, 80, 1)) <= where.rule(1e-6)


def test_removing_down_to_a_checkpoint(mixed: kvg.Model) -> None:
    """What rewind() can do, seq_rm() can; of all sequences too."""
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 40)
        ctx.kv.checkpoint(0)
        fill(ctx, 90)
        for p in (41, 30):
            with pytest.raises(kvg.InvalidArgumentError, match="lost"):
                ctx.kv.seq_rm(0, p, -1)
        assert (ctx.kv.checkpoints(0), ctx.kv.seq_pos_max(0)) == ([40], 89)
        ctx.kv.seq_rm(-1, 40, -1)
        assert nmse(go_on(ctx, 40), expected(mixed, 40)) <= where.rule(1e-6)
        fill(ctx, 90)
        ctx.kv.seq_rm(0, 39, -1)  # its window reaches back to here
        assert ctx.kv.checkpoints(0) == []
        assert nmse(go_on(ctx, 39), expected(mixed, 39)) <= where.rule(1e-6)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("saved_full", "loaded_full"), [(False, False), (True, False), (False, True)])
def test_checkpoints_are_saved(mixed: kvg.Model, whole: bool, saved_full: bool, loaded_full: bool) -> None:
    """One is where the window is, the other far behind; what is loaded into has windows of other sizes."""
    seq = None if whole else 0
    with (
        open_context(mixed, **OPTIONS, swa_full=saved_full) as ctx,
        open_context(mixed, **{**OPTIONS, "checkpoint_cells": 20}, swa_full=loaded_full) as other,
    ):
        for n in (40, 100):
            fill(ctx, n)
            ctx.kv.checkpoint(0)
        fill(ctx, 103)
        before = [ctx.kv.cells(group).held.tolist() for group in (0, 1)]
        blob = ctx.kv.save(seq)
        assert [ctx.kv.cells(group).held.tolist() for group in (0, 1)] == before
        fill(other, 60)
        other.kv.checkpoint(0)
        other.kv.load(blob, seq)
        assert other.kv.checkpoints(0) == [40, 100]
        assert other.kv.seq_pos_max(0) == 102
        for there in (103, 100, 40):
            other.kv.seq_rm(0, there, -1)
            assert nmse(go_on(other, there), expected(mixed, there)) <= where.rule(1e-6)


def test_checkpoints_that_find_no_room_are_left_out(mixed: kvg.Model) -> None:
    """The lowest ones first; and one that comes takes no cells from those that are there."""
    with open_context(mixed, **OPTIONS) as ctx, open_context(mixed, **OPTIONS | {"n_batch": 1}) as other:
        for n in (30, 50, 70):
            fill(ctx, n)
            ctx.kv.checkpoint(0)
        fill(ctx, 110)
        for n in range(20):
            decode(other, run_of(IDS[n : n + 1], n, (1,)))
        other.kv.checkpoint(1)
        other.kv.load(ctx.kv.save(0), 0)
        assert (other.kv.checkpoints(0), other.kv.checkpoints(1)) == ([50, 70], [20])
        other.kv.seq_rm(0, 50, -1)
        assert nmse(decode(other, run_of(IDS[50:51], 50)), expected_of(mixed, 50)) <= where.rule(1e-6)


def expected_of(model: kvg.Model, n: int) -> Any:
    with open_context(model, **OPTIONS, swa_full=True) as full:
        fill(full, n)
        return decode(full, run_of(IDS[n : n + 1], n))


def test_a_state_without_windows_bounds_goes_into_bounded_ones(mixed: kvg.Model) -> None:
    """The last cells that fit; before them all is lost."""
    with open_context(mixed, **OPTIONS, swa_full=True) as full, open_context(mixed, **OPTIONS) as ctx:
        fill(full, 120)
        full.kv.seq_cp(0, 1, 0, 60)
        for seq, expected_min in ((0, 120 - W), (None, 120 - W)):
            ctx.kv.load(full.kv.save(seq), seq)
            assert ctx.kv.seq_pos_min(0) <= expected_min
            with pytest.raises(kvg.InvalidArgumentError, match="lost"):
                ctx.kv.seq_rm(0, 50, -1)
            assert nmse(go_on(ctx, 120), go_on(full, 120)) <= where.rule(1e-6)
            full.kv.seq_rm(0, 120, -1)
        assert nmse(go_on(ctx, 60, 1), go_on(full, 60, 1)) <= where.rule(1e-6)


def test_other_tokens_come_before_a_checkpoint(mixed: kvg.Model) -> None:
    """Where what was just before it is gone, the sequence may go on below it, with another text."""
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 40)
        ctx.kv.checkpoint(0)
        fill(ctx, 45)
        ctx.kv.seq_rm(0, 35, 40)
        ctx.kv.seq_rm(0, 40, -1)
        assert (ctx.kv.checkpoints(0), ctx.kv.seq_pos_max(0)) == ([40], 34)
        fill(ctx, 45)
        assert ctx.kv.checkpoints(0) == []


def test_a_shared_prefix_is_gone_on_with(mixed: kvg.Model) -> None:
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 48)
        holds, point = [ctx.kv.hold(0, 0, 30), ctx.kv.hold(0, 30, -1)], ctx.kv.resume_point(0)
        assert point.p == 48
        fill(ctx, 120)
        ctx.kv.seq_rm(0, 0, -1)
        with pytest.raises(kvg.InvalidArgumentError, match="at position 48 and sequence 1 goes on at 0"):
            ctx.kv.attach(point, 1)
        for hold in holds:
            ctx.kv.attach(hold, 1)
        with pytest.raises(kvg.InvalidArgumentError, match="lost"):
            go_on(ctx, 48, 1)
        ctx.kv.attach(point, 1)
        assert ctx.kv.seq_pos_min(1) == 48 - W
        assert nmse(go_on(ctx, 48, 1), expected(mixed, 48)) <= where.rule(1e-6)
        point.release()
        with pytest.raises(kvg.InvalidArgumentError, match="released"):
            point.release()
        assert not ctx.kv.cells(WINDOW).held.any()
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.kv.attach(point, 1)


def test_a_resume_point_inside_a_text(mixed: kvg.Model) -> None:
    """Where the window still has what is needed there, whether or not the text has gone on since."""
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 93)  # in batches of 12: the last one begins at 84
        hold = ctx.kv.hold(0, 0, -1)
        points = [ctx.kv.resume_point(0, p) for p in (84, 88, 93)]
        assert [point.p for point in points] == [84, 88, 93]
        held = ctx.kv.cells(WINDOW)
        assert sorted(held.pos[held.held > 0]) == list(range(84 - W, 93))
        for p, said in ((0, "at position 0"), (94, "sequence 0 ends before 93"), (20, "has lost")):
            with pytest.raises(kvg.InvalidArgumentError, match=said):
                ctx.kv.resume_point(0, p)
        fill(ctx, 120)
        ctx.kv.seq_rm(0, 0, -1)
        for point in points:
            ctx.kv.attach(hold, 1, point.p)
            ctx.kv.attach(point, 1)
            assert nmse(go_on(ctx, point.p, 1), expected(mixed, point.p)) <= where.rule(1e-6)
            ctx.kv.seq_rm(1, 0, -1)


def test_room(mixed: kvg.Model) -> None:
    """What the window could have: all but what is held. Its own cells count, those of others don't."""
    with open_context(mixed, **OPTIONS) as ctx:
        n_cells = ctx.kv.groups[WINDOW].n_cells
        assert ctx.kv.room(0) == [-1, n_cells]
        fill(ctx, 20)
        assert ctx.kv.room(0) == [-1, n_cells]
        assert ctx.kv.room(1) == [-1, n_cells - W]
        point = ctx.kv.resume_point(0, 16)
        assert ctx.kv.room(0) == [-1, n_cells - W]
        point.release()
        assert ctx.kv.room(0) == [-1, n_cells]


def test_clear_releases(mixed: kvg.Model) -> None:
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 48)
        point = ctx.kv.resume_point(0)
        ctx.kv.checkpoint(0)
        ctx.kv.clear()
        assert ctx.kv.checkpoints(0) == []
        with pytest.raises(kvg.InvalidArgumentError, match="released"):
            point.release()


def test_models_without_windows_have_them_too(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        fill(ctx, 20)
        assert ctx.kv.checkpoint(0) == 20
        hold, point = ctx.kv.hold(0, 0, -1), ctx.kv.resume_point(0)
        fill(ctx, 30)
        assert ctx.kv.rewind(0, 25) == 25
        ctx.kv.seq_rm(0, 0, -1)
        ctx.kv.attach(hold, 0)
        ctx.kv.attach(point, 0)
        assert ctx.kv.seq_pos_max(0) == 19


def test_a_prefix_of_a_model_of_windows_alone(windowed: kvg.Model) -> None:
    """Its holds keep no cells, and say what comes before the resume point."""
    n = 50
    with open_context(windowed, **OPTIONS) as ctx, open_context(windowed, **OPTIONS, swa_full=True) as full:
        fill(full, n)
        fill(ctx, n)
        with pytest.raises(kvg.InvalidArgumentError, match="no cell at position 50"):
            ctx.kv.hold(0, 10, 51)
        holds, point = [ctx.kv.hold(0, 0, 30), ctx.kv.hold(0, 30, -1)], ctx.kv.resume_point(0)
        fill(ctx, 120)
        ctx.kv.seq_rm(0, 0, -1)
        with pytest.raises(kvg.InvalidArgumentError, match="goes on at 0"):
            ctx.kv.attach(point, 1)
        with pytest.raises(kvg.InvalidArgumentError, match="goes on at 0"):
            ctx.kv.attach(holds[1], 1)
        for hold in holds:
            ctx.kv.attach(hold, 1)
        assert (ctx.kv.seq_pos_max(1), ctx.kv.seq_pos_min(1)) == (-1, n)
        with pytest.raises(kvg.InvalidArgumentError, match="lost"):
            go_on(ctx, n, 1)
        ctx.kv.attach(point, 1)
        assert nmse(go_on(ctx, n, 1), go_on(full, n)) <= where.rule(1e-6)


def test_a_resume_point_takes_the_place_of_what_is_there(mixed: kvg.Model) -> None:
    """A sequence that stands at the point's position already has cells in the window: none of them stays."""
    with open_context(mixed, **OPTIONS) as ctx:
        fill(ctx, 40)
        point = ctx.kv.resume_point(0)
        fill(ctx, 40, seq=1)
        ctx.kv.attach(point, 1)
        view = ctx.kv.cells(WINDOW)
        seen = view.pos[view.seq[:, 1]]
        assert len(set(seen.tolist())) == len(seen)
        assert nmse(go_on(ctx, 40, 1), expected(mixed, 40)) <= where.rule(1e-6)

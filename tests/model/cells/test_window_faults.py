"""A fault while a model with a window copies, moves or loads cells: all stays as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from support import where
from support.engines import Logits, decode, open_context, random_ids, run_of
from support.faults import fault, set_fault
from support.judge import nmse
from support.models import N_VOCAB
from support.models import WINDOW as W

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

N_BATCH, WINDOW = 12, 1  # WINDOW: the group
IDS = random_ids(160, N_VOCAB)
OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": N_BATCH,
    "n_ubatch": 5,
    "n_seq_max": 3,
    "type_k": "f32",
    "type_v": "f32",
    "defrag_threshold": -1,
}
AMPLE, TIGHT = 10 * W, 2 * W  # cells for checkpoints: there are many more left behind, or few


@pytest.fixture(scope="module", autouse=True)
def hooks() -> None:
    set_fault("cells", 0)


class Standing(NamedTuple):
    """All that is told of the cells but where they lie: of each group its cells, and of each sequence."""

    cells: list[Counter[tuple[int, int, bytes, int]]]
    lost: list[int]
    checkpoints: list[list[int]]
    bounds: list[list[int]]


def standing(kv: kvg.KVCache) -> Standing:
    cells = []
    for view in (kv.cells(group) for group in range(len(kv.groups))):
        used = np.flatnonzero(view.pos >= 0)
        cells.append(
            Counter(
                (int(view.pos[i]), int(view.shift[i]), view.seq[i].tobytes(), int(view.held[i])) for i in used
            )
        )
    lost = [kv._lost(WINDOW, seq) for seq in (0, 1)]
    return Standing(
        cells, lost, [kv.checkpoints(seq) for seq in (0, 1)], [a.tolist() for a in kv.seq_bounds()]
    )


def without_shift(told: Standing) -> Standing:
    """For work that may be done in one group and not in another."""
    cells = [Counter((pos, 0, seqs, held) for pos, _, seqs, held in group.elements()) for group in told.cells]
    return told._replace(cells=cells)


def fill(ctx: kvg.Context, n: int, seq: int = 0) -> None:
    begin = ctx.kv.seq_pos_max(seq) + 1
    for pos in range(begin, n, N_BATCH):
        decode(ctx, run_of(IDS[pos : min(pos + N_BATCH, n)], pos, (seq,)))


def prepare(ctx: kvg.Context) -> None:
    """Two sequences that part at 100, with checkpoints of the first at 60, far behind, and at 98.

    A third one takes some of what they have left behind, and is gone again: so much room is empty.
    """
    begin(ctx)
    fill(ctx, 60, 2)
    ctx.kv.seq_rm(2, 0, -1)
    assert ctx.kv._lost(WINDOW, 0) > 10


def begin(ctx: kvg.Context) -> None:
    """The same, without the third one."""
    for n in (60, 98):
        fill(ctx, n)
        ctx.kv.checkpoint(0)
    fill(ctx, 100)
    ctx.kv.seq_cp(0, 1, 0, -1)
    fill(ctx, 110)
    fill(ctx, 103, 1)
    ctx.kv.update()


def leave_work(ctx: kvg.Context) -> None:
    """Holes, a pending shift, and cells that a checkpoint alone holds among those to be moved."""
    prepare(ctx)
    ctx.kv.seq_rm(1, 101, 102)
    ctx.kv.seq_rm(0, 20, 40)
    ctx.kv.seq_add(0, 104, -1, 5)


def next_logits(ctx: kvg.Context) -> list[Logits]:
    """Where each sequence stands, and then where the checkpoints lead to."""
    rows = []
    for seq in (0, 1):
        end = ctx.kv.seq_pos_max(seq) + 1
        rows.append(decode(ctx, run_of(IDS[150:153], end, (seq,))))
        ctx.kv.seq_rm(seq, end, -1)
    for p in reversed(ctx.kv.checkpoints(0)):
        assert ctx.kv.rewind(0, p) == p
        rows.append(decode(ctx, run_of(IDS[150:153], p)))
        ctx.kv.seq_rm(0, p, -1)
    return rows


def same(found: list[Logits], expected: list[Logits]) -> bool:
    return all(nmse(a, b) <= where.rule(1e-6) for a, b in zip(found, expected, strict=True))


def fail(site: str, call: Callable[[], object], check: Callable[[], None]) -> int:
    """Makes the call fail in its first pass through the site, then in its second, until it is done.

    check: what is to be true after each failure. Returns how many there were.
    """
    for countdown in range(1, 50):
        with fault(site, countdown):
            try:
                call()
                return countdown - 1
            except kvg.DeviceError:
                check()
    raise AssertionError("it is never done")


CHANGES: dict[str, tuple[str, tuple[int, ...], list[int]]] = {
    "all move": ("seq_add", (0, 0, -1, 7), [67, 105]),
    "60 can't": ("seq_add", (0, 50, -1, -10), [88]),  # its window would reach back to what is lost
    "none can": ("seq_div", (0, 95, -1, 2), []),
    "another's": ("seq_add", (1, 0, -1, 7), [60, 98]),
}


@pytest.mark.parametrize("site", ["copy-build", "copy-alloc", "copy-compute"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_that_fails_changes_nothing(mixed: kvg.Model, site: str, change: str) -> None:
    op, arguments, checkpoints = CHANGES[change]
    options = OPTIONS | {"checkpoint_cells": AMPLE}
    with open_context(mixed, **options) as ctx, open_context(mixed, **options) as other:
        for each in (ctx, other):
            prepare(each)
        before = standing(ctx.kv)

        def unchanged() -> None:
            assert standing(ctx.kv) == before

        call = partial(getattr(ctx.kv, op), *arguments)
        assert fail(site, call, unchanged) == 2  # a graph in each group
        getattr(other.kv, op)(*arguments)
        assert standing(ctx.kv) == standing(other.kv) != before
        assert ctx.kv.checkpoints(0) == checkpoints
        assert same(next_logits(ctx), next_logits(other))


@pytest.mark.parametrize("site", ["copy-build", "copy-alloc", "copy-compute"])
@pytest.mark.parametrize("change", ["all move", "60 can't"])
def test_a_copy_that_fails_may_lose_what_is_left_behind(mixed: kvg.Model, site: str, change: str) -> None:
    """The window has room for copies in these cells alone, and the copies may have been written there."""
    op, arguments, _ = CHANGES[change]
    options = OPTIONS | {"checkpoint_cells": TIGHT}
    with open_context(mixed, **options) as ctx, open_context(mixed, **options) as untouched:
        for each in (ctx, untouched):
            begin(each)
        before = standing(ctx.kv)
        assert ctx.kv.groups[WINDOW].n_used == ctx.kv.groups[WINDOW].n_cells
        with fault(site, 2), pytest.raises(kvg.DeviceError):
            getattr(ctx.kv, op)(*arguments)
        after = standing(ctx.kv)
        assert after.checkpoints == before.checkpoints == [[60, 98], []]
        assert after.cells[0] == before.cells[0]
        assert before.lost[0] < after.lost[0] <= 109 - W
        assert (
            not before.cells[WINDOW]
            - after.cells[WINDOW]
            - Counter({cell: n for cell, n in before.cells[WINDOW].items() if cell[0] <= max(after.lost)})
        )
        assert same(next_logits(ctx), next_logits(untouched))


@pytest.mark.parametrize("policy", ["fill", "sort"])
@pytest.mark.parametrize("site", ["shift-build", "shift-alloc", "defrag-build", "defrag-alloc"])
def test_an_update_that_fails_can_be_called_again(
    mixed: kvg.Model, site: str, policy: Literal["fill", "sort"]
) -> None:
    options = OPTIONS | {"checkpoint_cells": AMPLE}
    with open_context(mixed, **options) as other:
        leave_work(other)
        expected = next_logits(other)
    with open_context(mixed, **options) as ctx:
        leave_work(ctx)
        before = without_shift(standing(ctx.kv))
        ctx.kv.defrag(policy)

        def unchanged() -> None:
            assert without_shift(standing(ctx.kv)) == before

        assert fail(site, ctx.kv.update, unchanged) == 2
        unchanged()
        assert all(group.n_kv == group.n_used for group in ctx.kv.groups)
        assert same(next_logits(ctx), expected)


def broken(ctx: kvg.Context, before: Standing) -> None:
    """Nothing that is told has changed, and nobody reads K and V."""
    assert without_shift(standing(ctx.kv)) == before
    for call in (
        ctx.kv.update,
        ctx.kv.save,
        partial(decode, ctx, run_of(IDS[:3], 120)),
        partial(ctx.kv.read_k, 0),
    ):
        with pytest.raises(kvg.DeviceError, match="clear"):
            call()
    assert without_shift(standing(ctx.kv)) == before


@pytest.mark.parametrize(
    ("site", "policy", "n_groups"),
    [("shift-compute", "fill", 2), ("defrag-compute", "sort", 2), ("defrag-cells", "sort", 2)],
)
def test_work_in_place_that_fails_breaks_the_cache(
    mixed: kvg.Model, site: str, policy: Literal["fill", "sort"], n_groups: int
) -> None:
    """Whichever group it is in."""
    options = OPTIONS | {"checkpoint_cells": AMPLE}
    for countdown in range(1, n_groups + 1):
        with open_context(mixed, **options) as ctx:
            leave_work(ctx)
            ctx.kv.defrag(policy)
            before = without_shift(standing(ctx.kv))
            with fault(site, countdown), pytest.raises(kvg.DeviceError):
                ctx.kv.update()
            broken(ctx, before)
            ctx.kv.clear()
            assert ctx.kv.checkpoints(0) == []
            fill(ctx, 20)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("countdown", [1, 2])
def test_a_load_that_fails_breaks_the_cache(mixed: kvg.Model, whole: bool, countdown: int) -> None:
    seq = None if whole else 1
    options = OPTIONS | {"checkpoint_cells": AMPLE}
    with open_context(mixed, **options) as ctx, open_context(mixed, **options) as other:
        prepare(other)
        blob = other.kv.save(None if whole else 0)
        prepare(ctx)
        before = standing(ctx.kv)
        with fault("load-write", countdown), pytest.raises(kvg.DeviceError):
            ctx.kv.load(blob, seq)
        broken(ctx, before)
        ctx.kv.clear()
        ctx.kv.load(blob, seq)
        assert ctx.kv.checkpoints(0 if whole else 1) == [60, 98]
        if whole:
            assert standing(ctx.kv) == standing(other.kv)
            assert same(next_logits(ctx), next_logits(other))

"""A fault in the middle of a decode or an update: nothing is half done, and the next call is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from support import where
from support.engines import Logits, Token, decode, open_context, random_ids, run_of
from support.faults import fault, set_fault
from support.judge import nmse
from support.kv_rows import Contents, contents, same_cells
from support.models import N_VOCAB, SMALL, TWO_GROUPS, ModelSpec

import pykvgraph as kvg

DECODE_SITES = ["cells", "build", "alloc", "compute"]
SHIFT_SITES = ["shift-build", "shift-alloc", "shift-compute"]
DEFRAG_SITES = ["defrag-build", "defrag-alloc", "defrag-compute"]
COPY_SITES = ["copy-build", "copy-alloc", "copy-compute"]
OPTIONS = {"n_ctx": 128, "n_batch": 64, "n_ubatch": 6, "n_seq_max": 2, "defrag_threshold": -1}


@pytest.fixture(scope="module", params=[SMALL, TWO_GROUPS], ids=["one group", "two groups"])
def small(request: pytest.FixtureRequest, model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """In place of the model of that name: what fails in one group must not show in the other."""
    with kvg.Model(model_file(request.param), device=where.device) as model:
        yield model


@pytest.fixture(scope="module", autouse=True)
def hooks() -> None:
    set_fault("cells", 0)


def fires(site: str, countdown: int, call: Callable[[], object]) -> bool:
    """Whether the call met its countdown-th pass through the site, and failed there."""
    with fault(site, countdown):
        try:
            call()
        except kvg.DeviceError:
            return True
    return False


def prepare(ctx: kvg.Context) -> None:
    decode(ctx, run_of(random_ids(40, N_VOCAB)))
    decode(ctx, run_of(random_ids(20, N_VOCAB, 1), 0, (1,)))
    ctx.kv.update()


def all_contents(ctx: kvg.Context) -> list[Contents]:
    return [contents(ctx.kv, seq) for seq in range(ctx.kv.n_seq_max)]


def leave_work(ctx: kvg.Context, policy: Literal["fill", "sort"] = "fill") -> None:
    """Holes, a pending shift, and defrag asked for."""
    prepare(ctx)
    for p0 in range(4, 30, 3):
        ctx.kv.seq_rm(0, p0, p0 + 1)
    ctx.kv.seq_add(0, 20, -1, 50)
    ctx.kv.defrag(policy)


# more than n_ubatch tokens: several graphs, of which the first two have shapes that prepare() had no use for
FOLLOWING = [*run_of(random_ids(14, N_VOCAB, 2), 100), *run_of(random_ids(6, N_VOCAB, 3), 40, (1,))]
for _i in (0, 6, 7):
    FOLLOWING[_i] = FOLLOWING[_i]._replace(logits=False)


def expected_logits(model: kvg.Model, make: Callable[[kvg.Context], None]) -> Logits:
    with open_context(model, **OPTIONS) as ctx:
        make(ctx)
        return decode(ctx, FOLLOWING)


@pytest.mark.parametrize("site", DECODE_SITES)
def test_decode_is_all_or_nothing(small: kvg.Model, site: str) -> None:
    expected = expected_logits(small, prepare)
    countdown = 1
    while True:
        with open_context(small, **OPTIONS) as ctx:
            prepare(ctx)
            before = ctx.kv.cells()
            held = all_contents(ctx)
            if not fires(site, countdown, partial(decode, ctx, FOLLOWING)):
                break
            assert same_cells(ctx.kv.cells(), before)
            assert all_contents(ctx) == held
            with pytest.raises(kvg.KVGraphError):
                ctx.logits()
            assert nmse(decode(ctx, FOLLOWING), expected) <= 1e-6
        countdown += 1
    # the cells are taken once, a graph is made for each new shape, and computed for each micro-batch
    assert countdown - 1 >= {"cells": 1, "build": 2, "alloc": 2, "compute": 4}[site]


@pytest.mark.parametrize(
    ("site", "policy"),
    [
        *[(site, policy) for site in (*SHIFT_SITES[:2], *DEFRAG_SITES[:2]) for policy in ("fill", "sort")],
        ("defrag-compute", "fill"),  # moves into holes only: sources stay
    ],
)
@pytest.mark.parametrize("through", ["update", "decode"])
def test_update_can_be_called_again(
    small: kvg.Model, site: str, through: str, policy: Literal["fill", "sort"]
) -> None:
    """What was completed before the fault may remain; in the end all is as it would have been."""
    make = partial(leave_work, policy=policy)
    expected = expected_logits(small, make)
    with open_context(small, **OPTIONS) as ctx:
        make(ctx)
        ctx.kv.update()
        held, places = all_contents(ctx), ctx.kv.cells()
    countdown = 1
    while True:
        with open_context(small, **OPTIONS) as ctx:
            make(ctx)
            before = ctx.kv.cells()
            call = ctx.kv.update if through == "update" else partial(decode, ctx, FOLLOWING)
            if not fires(site, countdown, call):
                break
            after = ctx.kv.cells()
            assert positions(after) == positions(before)
            if site in SHIFT_SITES:
                assert np.array_equal(
                    after.pos, places.pos
                )  # cells lie where they will stay before K is rotated
            stats = ctx.kv.update()
            assert (stats.moved_cells > 0) == (site in DEFRAG_SITES)
            assert stats.shifted_cells > 0
            assert same_cells(ctx.kv.cells(), places)
            assert all_contents(ctx) == held
            assert nmse(decode(ctx, FOLLOWING), expected) <= 1e-6
        countdown += 1
    assert countdown > 1


@pytest.mark.parametrize(
    ("site", "policy"),
    [
        ("shift-compute", "fill"),
        ("shift-compute", "sort"),
        ("defrag-compute", "sort"),
        ("defrag-cells", "sort"),  # rows moved, and the cells can't follow
    ],
)
@pytest.mark.parametrize("through", ["update", "decode"])
def test_what_works_in_place_breaks_the_cache_until_it_is_cleared(
    small: kvg.Model, site: str, through: str, policy: Literal["fill", "sort"]
) -> None:
    """K half rotated, or rows half sorted: nobody may read them, whatever is called."""
    expected = expected_logits(small, prepare)
    with open_context(small, **OPTIONS) as ctx:
        prepare(ctx)
        one, whole = ctx.kv.save(seq=1), ctx.kv.save()
        ctx.reset()
        leave_work(ctx, policy)
        ctx.kv.seq_cp(0, 1, 0, 3)
        before = positions(ctx.kv.cells())
        assert fires(site, 1, ctx.kv.update if through == "update" else partial(decode, ctx, FOLLOWING))
        refuses_until_cleared(ctx, one, whole)
        with pytest.raises(kvg.DeviceError, match="clear"):
            ctx.kv.seq_add(1, 0, 3, 5)  # copies
        assert positions(ctx.kv.cells()) == before
        ctx.kv.clear()
        prepare(ctx)
        assert nmse(decode(ctx, FOLLOWING), expected) <= 1e-6


def refuses_until_cleared(ctx: kvg.Context, one: bytes, whole: bytes) -> None:
    """Whatever would use K and V; metadata is still told."""
    calls: list[Callable[[], object]] = [
        ctx.kv.update,
        partial(decode, ctx, FOLLOWING),
        partial(ctx.kv.read_k, 0),
        partial(ctx.kv.read_v, 0),
        ctx.kv.save,
        partial(ctx.kv.load, one, 1),
        partial(ctx.kv.load, whole),
    ]
    for call in calls:
        with pytest.raises(kvg.DeviceError, match="clear"):
            call()


@pytest.mark.parametrize("whole", [False, True])
def test_a_load_that_fails_half_way_breaks_the_cache_until_it_is_cleared(
    small: kvg.Model, whole: bool
) -> None:
    """The rows may lie where the replaced sequence's were, and its cells are still there."""
    expected = expected_logits(small, prepare)
    with open_context(small, **OPTIONS) as ctx:
        prepare(ctx)
        one, all_of_it = ctx.kv.save(seq=1), ctx.kv.save()
        before = ctx.kv.cells()
        call = partial(ctx.kv.load, all_of_it) if whole else partial(ctx.kv.load, one, 0)
        assert fires("load-write", 1, call)
        assert same_cells(ctx.kv.cells(), before)
        refuses_until_cleared(ctx, one, all_of_it)
        ctx.kv.clear()
        ctx.kv.load(all_of_it)
        assert nmse(decode(ctx, FOLLOWING), expected) <= 1e-6


def positions(cells: kvg.CellsView) -> list[tuple[int, tuple[bool, ...]]]:
    return sorted((int(cells.pos[i]), tuple(cells.seq[i].tolist())) for i in np.flatnonzero(cells.pos >= 0))


def share(ctx: kvg.Context) -> None:
    """Both sequences see forty cells, eight of which wait for a rotation."""
    decode(ctx, run_of(random_ids(40, N_VOCAB)))
    ctx.kv.seq_add(0, 32, -1, 3)
    ctx.kv.seq_cp(0, 1, 0, -1)


@pytest.mark.parametrize(("op", "number"), [("seq_add", 9), ("seq_div", 3)])
@pytest.mark.parametrize("site", COPY_SITES)
def test_copy_on_write_is_all_or_nothing(small: kvg.Model, site: str, op: str, number: int) -> None:
    with open_context(small, **OPTIONS) as ctx, open_context(small, **OPTIONS) as untroubled:
        for each in (ctx, untroubled):
            share(each)
        before = ctx.kv.cells()
        call = partial(getattr(ctx.kv, op), 1, 5, -1, number)
        n_groups = len(ctx.kv.groups)
        for countdown in range(1, n_groups + 1):
            assert fires(site, countdown, call)
            assert all(same_cells(ctx.kv.cells(group), before) for group in range(n_groups))
        assert not fires(site, n_groups + 1, call)  # one graph in each group is enough
        getattr(untroubled.kv, op)(1, 5, -1, number)
        assert same_cells(ctx.kv.cells(), untroubled.kv.cells())
        assert all_contents(ctx) == all_contents(untroubled)


WIDE_OPTIONS = {"type_k": "f32", "type_v": "f32", "n_seq_max": 2, "defrag_threshold": -1}


@pytest.mark.parametrize("site", COPY_SITES)
def test_a_copy_in_several_graphs_is_all_or_nothing(wide: kvg.Model, site: str) -> None:
    """Scattered cells whose rows don't fit the scratch at once; the first graph's work must not show."""
    n = 310
    with open_context(wide, n_ctx=2 * n, **WIDE_OPTIONS) as ctx:
        decode(ctx, [token._replace(logits=False) for token in run_of(random_ids(n, N_VOCAB))])
        for p0 in range(0, n, 6):
            ctx.kv.seq_cp(0, 1, p0, p0 + 5)
        before, held = ctx.kv.cells(), all_contents(ctx)
        call = partial(ctx.kv.seq_add, 1, 0, -1, 7)
        assert fires(site, 2, call)
        assert same_cells(ctx.kv.cells(), before)
        assert all_contents(ctx) == held
        assert not fires(site, 3, call)
        ctx.kv.seq_add(1, 0, -1, -7)
        assert all_contents(ctx) == held


@pytest.mark.parametrize("site", DEFRAG_SITES[:2])
def test_sort_between_two_steps(wide: kvg.Model, site: str) -> None:
    """The steps before the fault are done, cells and rows alike, and the next update does the others."""
    n = 300
    with open_context(wide, n_ctx=n, **WIDE_OPTIONS) as ctx:
        decode(ctx, [Token(5 + i % 200, i // 2, (i % 2,), logits=False) for i in range(n)])
        before, held = ctx.kv.cells(), all_contents(ctx)
        ctx.kv.defrag("sort")
        assert fires(site, 2, ctx.kv.update)
        assert not same_cells(ctx.kv.cells(), before)
        assert all_contents(ctx) == held
        assert ctx.kv.update().moved_cells > 0
        assert all_contents(ctx) == held
        assert ctx.kv.cells().seq[:, 0].tolist() == [True] * (n // 2) + [False] * (n // 2)


@pytest.mark.parametrize("site", ["defrag-compute", "defrag-cells"])
def test_sort_that_fails_in_its_second_step(wide: kvg.Model, site: str) -> None:
    """One step is done, cells and rows alike; of the other nobody knows: unusable until clear()."""
    n = 300
    tokens = [Token(5 + i % 200, i // 2, (i % 2,), logits=i >= n - 2) for i in range(n)]
    with open_context(wide, n_ctx=n, **WIDE_OPTIONS) as ctx:
        expected = decode(ctx, tokens)
        one, whole = ctx.kv.save(seq=1), ctx.kv.save()
        before = positions(ctx.kv.cells())
        ctx.kv.defrag("sort")
        assert fires(site, 2, ctx.kv.update)
        refuses_until_cleared(ctx, one, whole)
        assert positions(ctx.kv.cells()) == before
        ctx.kv.clear()
        assert ctx.kv.update().graphs == 0
        assert np.array_equal(decode(ctx, tokens), expected)


@pytest.mark.parametrize("site", SHIFT_SITES[:2])
def test_a_save_that_cannot_rotate_changes_nothing(small: kvg.Model, site: str) -> None:
    """It rotates what is pending first; a load leaves that alone."""
    with open_context(small, **OPTIONS) as ctx:
        prepare(ctx)
        one = ctx.kv.save(seq=1)
        ctx.kv.seq_add(0, 10, -1, 5)
        before = ctx.kv.cells()
        assert fires(site, 1, ctx.kv.save)
        assert same_cells(ctx.kv.cells(), before)
        with fault(site, 1):
            ctx.kv.load(one, 0)
        assert all_contents(ctx)[0] == all_contents(ctx)[1]


def test_unknown_site() -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="nowhere"):
        set_fault("nowhere", 1)


def test_a_fault_passes_by_other_sites(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as ctx, fault("defrag-compute", 1):
        prepare(ctx)
        decode(ctx, [Token(5, 40)])
        assert ctx.kv.n_used == 61

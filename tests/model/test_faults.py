"""A fault in the middle of a decode or an update: nothing is half done, and the next call is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from support.engines import Logits, Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import contents
from support.models import N_VOCAB

import pykvgraph as kvg
from pykvgraph._native.library import lib

DECODE_SITES = ["cells", "build", "alloc", "compute"]
SHIFT_SITES = ["shift-build", "shift-alloc", "shift-compute"]
DEFRAG_SITES = ["defrag-build", "defrag-alloc", "defrag-compute"]
OPTIONS = {"n_ctx": 128, "n_batch": 64, "n_ubatch": 6, "n_seq_max": 2, "defrag_threshold": -1}


@pytest.fixture(scope="module", autouse=True)
def hooks() -> None:
    try:
        lib().kvg_test_fault(b"cells", 0)
    except kvg.UnsupportedError:
        pytest.skip("this libkvgraph was built without KVGRAPH_TEST_HOOKS")


@contextmanager
def fault(site: str, countdown: int) -> Iterator[None]:
    lib().kvg_test_fault(site.encode(), countdown)
    try:
        yield
    finally:
        lib().kvg_test_fault(site.encode(), 0)


def fires(site: str, countdown: int, call: Callable[[], object]) -> bool:
    """Whether the call met its countdown-th pass through the site, and failed there."""
    with fault(site, countdown):
        try:
            call()
        except kvg.DeviceError as error:
            assert site in str(error)
            return True
    return False


def prepare(ctx: kvg.Context) -> None:
    decode(ctx, run_of(random_ids(40, N_VOCAB)))
    decode(ctx, run_of(random_ids(20, N_VOCAB, 1), 0, (1,)))
    ctx.kv.update()


def leave_work(ctx: kvg.Context) -> None:
    """Holes, a pending shift, and defrag asked for."""
    prepare(ctx)
    for p0 in range(4, 30, 3):
        ctx.kv.seq_rm(0, p0, p0 + 1)
    ctx.kv.seq_add(0, 20, -1, 50)
    ctx.kv.defrag("fill")


# more than n_ubatch tokens: several graphs, of which the last has another shape
FOLLOWING = [*run_of(random_ids(14, N_VOCAB, 2), 100), *run_of(random_ids(6, N_VOCAB, 3), 40, (1,))]


def expected_logits(model: kvg.Model, make: Callable[[kvg.Context], None]) -> Logits:
    with open_context(model, **OPTIONS) as ctx:
        make(ctx)
        return decode(ctx, FOLLOWING)


def same_cells(ctx: kvg.Context, before: kvg.CellsView) -> bool:
    now = ctx.kv.cells()
    return all(np.array_equal(getattr(now, name), getattr(before, name)) for name in ("pos", "seq", "shift"))


@pytest.mark.parametrize("site", DECODE_SITES)
def test_decode_is_all_or_nothing(small: kvg.Model, site: str) -> None:
    expected = expected_logits(small, prepare)
    countdown = 1
    while True:
        with open_context(small, **OPTIONS) as ctx:
            prepare(ctx)
            before = ctx.kv.cells()
            held = [contents(ctx.kv, small.n_layer, seq) for seq in range(2)]
            if not fires(site, countdown, partial(decode, ctx, FOLLOWING)):
                break
            assert same_cells(ctx, before)
            assert [contents(ctx.kv, small.n_layer, seq) for seq in range(2)] == held
            with pytest.raises(kvg.KVGraphError):
                ctx.logits()
            assert nmse(decode(ctx, FOLLOWING), expected) <= 1e-6
        countdown += 1
    # the cells are taken once, a graph is made whenever the shape changes, and computed for each micro-batch
    assert countdown - 1 >= {"cells": 1, "build": 2, "alloc": 2, "compute": 4}[site]


@pytest.mark.parametrize("through", ["update", "decode"])
@pytest.mark.parametrize("site", [*SHIFT_SITES, *DEFRAG_SITES])
def test_update_can_be_called_again(small: kvg.Model, site: str, through: str) -> None:
    """What was completed before the fault may remain; in the end all is as it would have been."""
    expected = expected_logits(small, leave_work)
    with open_context(small, **OPTIONS) as ctx:
        leave_work(ctx)
        ctx.kv.update()
        held = [contents(ctx.kv, small.n_layer, seq) for seq in range(2)]
    countdown = 1
    while True:
        with open_context(small, **OPTIONS) as ctx:
            leave_work(ctx)
            before = ctx.kv.cells()
            call = ctx.kv.update if through == "update" else partial(decode, ctx, FOLLOWING)
            if not fires(site, countdown, call):
                break
            after = ctx.kv.cells()
            assert positions(after) == positions(before)
            if site in SHIFT_SITES:
                assert np.array_equal(after.pos, before.pos)  # nothing moves before K is right
            stats = ctx.kv.update()
            assert (stats.shifted_cells > 0) == (site in SHIFT_SITES)
            assert stats.moved_cells > 0
            assert ctx.kv.n_kv == ctx.kv.n_used
            assert [contents(ctx.kv, small.n_layer, seq) for seq in range(2)] == held
            assert nmse(decode(ctx, FOLLOWING), expected) <= 1e-6
        countdown += 1
    assert countdown > 1


def positions(cells: kvg.CellsView) -> list[tuple[int, tuple[bool, ...]]]:
    return sorted((int(cells.pos[i]), tuple(cells.seq[i].tolist())) for i in np.flatnonzero(cells.pos >= 0))


def test_unknown_site() -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="nowhere"):
        lib().kvg_test_fault(b"nowhere", 1)


def test_a_fault_passes_by_other_sites(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as ctx, fault("defrag-compute", 1):
        prepare(ctx)
        decode(ctx, [Token(5, 40)])
        assert ctx.kv.n_used == 61

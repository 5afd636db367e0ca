"""save and load where cells are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import where
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB, SMALL, TWO_GROUPS, ModelSpec
from support.saved_text import OPTIONS, all_cells, held, populate

import pykvgraph as kvg

pytestmark = pytest.mark.any_device


@pytest.fixture(scope="module", params=[SMALL, TWO_GROUPS], ids=["one group", "two groups"])
def small(request: pytest.FixtureRequest, model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """In place of the model of that name."""
    with kvg.Model(model_file(request.param), device=where.device) as model:
        yield model


def test_held_cells_that_nobody_sees(small: kvg.Model) -> None:
    """They are not saved; loading leaves the hold and its cells, and the hold can be attached again."""
    with open_context(small, **OPTIONS) as ctx:
        populate(ctx)
        without, before = ctx.kv.save(), held(ctx)
        decode(ctx, run_of(random_ids(15, N_VOCAB, 7), 0, (3,)))
        hold, expected = ctx.kv.hold(3, 0, 9), held(ctx)[3]
        ctx.kv.seq_rm(3, 0, -1)
        assert ctx.kv.save() == without
        for _ in range(2):
            ctx.kv.load(without)
            assert held(ctx) == before
            assert all((cells.held > 0).sum() == 9 for cells in all_cells(ctx))
        ctx.kv.load(ctx.kv.save(seq=2), 0)
        ctx.kv.attach(hold, 3)
        there = held(ctx)[3]
        assert there == {key: n for key, n in expected.items() if key[1] < 9}
        hold.release()


def test_held_cells_that_a_sequence_sees(small: kvg.Model) -> None:
    """They are saved, and stay beside what comes back in other cells."""
    with open_context(small, **OPTIONS) as ctx:
        decode(ctx, run_of(random_ids(10, N_VOCAB)))
        hold, before = ctx.kv.hold(0, 0, 6), held(ctx)
        ctx.kv.load(ctx.kv.save())
        assert held(ctx) == before
        assert ctx.kv.n_used == 10 + 6
        ctx.kv.attach(hold, 2)
        assert held(ctx)[2] == {key: n for key, n in before[0].items() if key[1] < 6}

"""States of format 1, which is no longer written, still load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engines import Token, decode, open_context, run_of
from support.judge import nmse
from support.kv_rows import seqs_of
from support.models import TINY, ModelSpec
from support.saved_text import OPTIONS, held, populate, refused
from support.state_bytes import format_1

import pykvgraph as kvg
from pykvgraph.kv_cache.saved.format import unpack
from pykvgraph.kv_cache.saved.transfer import read_geometry

OLD_FILE = Path(__file__).parents[2] / "data" / "format-1.kvgstate"


@pytest.fixture
def ctx(small: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(small, **OPTIONS) as ctx:
        populate(ctx)
        yield ctx


def test_a_file_that_the_old_package_wrote(model_file: Callable[[ModelSpec], Path]) -> None:
    """It is the text that tests/data/README.md tells of, and goes on as that does."""
    options = {"n_ctx": 64, "n_seq_max": 3}
    after = [Token(40 + i, 19 + i, (0,)) for i in range(4)]
    with kvg.Model(model_file(TINY), device="CPU") as model, open_context(model, **options) as ctx:
        decode(ctx, [token._replace(logits=False) for token in run_of(list(range(5, 17)), 0, (0, 1))])
        decode(ctx, run_of(list(range(32, 37)), 12, (0,)))
        ctx.kv.seq_rm(0, 3, 5)
        ctx.kv.seq_add(0, 5, -1, 2)
        ctx.kv.update()
        with open_context(model, **options) as other:
            other.kv.load_file(OLD_FILE)
            for layer in range(model.n_layer):
                for read in ("read_k", "read_v"):
                    rows, expected = (in_order(each, getattr(each.kv, read)(layer)) for each in (other, ctx))
                    assert rows.keys() == expected.keys()
                    assert max(np.abs(rows[key] - expected[key]).max() for key in rows) <= 5e-3
            assert nmse(decode(other, after), decode(ctx, after)) <= 1e-5


def in_order(ctx: kvg.Context, rows: np.ndarray) -> dict[tuple[int, tuple[int, ...]], np.ndarray]:
    """The rows of used cells, by position and sequences."""
    cells = ctx.kv.cells()
    return {(int(cells.pos[i]), seqs_of(cells, i)): rows[i] for i in np.flatnonzero(cells.pos >= 0)}


def test_format_1_still_loads(ctx: kvg.Context, small: kvg.Model) -> None:
    geometry = ctx.kv._handle.call(read_geometry)
    before = held(ctx)
    whole, one = (unpack(ctx.kv.save(seq), geometry) for seq in (None, 1))
    with open_context(small, **OPTIONS) as other:
        other.kv.load(bytes(format_1(geometry, whole)))
        assert held(other) == before
        other.kv.load(bytes(format_1(geometry, one)), 3)
        assert held(other)[3] == before[1]
        damaged = format_1(geometry, whole)
        damaged[-1] ^= 1
        refused(other, kvg.StateError, lambda: other.kv.load(damaged), "K and V are damaged")

"""What copy and pickle make of every public object: a right copy, or a typed error, never a second owner."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import open_context

import pykvgraph as kvg


def pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda value: pickle.loads(pickle.dumps(value, protocol))


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {protocol}": pickled(protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
}
OWNERS = ("Model", "Context", "KVCache", "Tokenizer", "Sampler", "GgufFile", "LongReader", "Handle")


@pytest.fixture(scope="module")
def owners(stories: Path) -> Iterator[dict[str, Any]]:
    """One of each class whose objects hold something native."""
    with (
        kvg.Model(stories, device="cpu") as model,
        open_context(model, n_ctx=256, n_batch=32) as ctx,
        kvg.GgufFile(stories) as file,
    ):
        yield {
            "Model": model,
            "Context": ctx,
            "KVCache": ctx.kv,
            "Tokenizer": model.tokenizer,
            "Sampler": kvg.Sampler(1.0),
            "GgufFile": file,
            "LongReader": kvg.LongReader(ctx),
            "Handle": ctx._handle,
        }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OWNERS)
def test_what_owns_something_native_is_refused(owners: dict[str, Any], name: str, way: str) -> None:
    with pytest.raises(kvg.KVGraphError, match=rf"a {name} can't be copied or pickled") as caught:
        WAYS[way](owners[name])
    assert isinstance(caught.value, TypeError)  # as Python's own objects say it, so that callers know it


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_copied(way: str) -> None:
    """The copy has the tokens of that moment, more than fit at first, and its own memory."""
    batch = kvg.Batch()
    batch.extend(np.arange(100), 5, (0, 3), "all")
    other = WAYS[way](batch)
    batch.clear()
    batch.add(7, 0)
    arrays = other.snapshot()
    assert len(other) == 100
    assert arrays.token.tolist() == list(range(100))
    assert arrays.pos.tolist() == list(range(5, 105))
    assert arrays.seq_begin.tolist() == list(range(0, 201, 2))
    assert arrays.seq_id.tolist() == [0, 3] * 100
    assert arrays.logits.tolist() == [1] * 100
    other.add(1, 105)
    assert (len(other), len(batch)) == (101, 1)


class NamedBatch(kvg.Batch):
    """A caller's own."""

    name = ""


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_a_class_of_its_own_is_copied(way: str) -> None:
    batch = NamedBatch()
    batch.name = "first"
    batch.add(7, 0)
    other = WAYS[way](batch)
    assert (other.name, other.rows()) == ("first", batch.rows())


@pytest.mark.parametrize("way", WAYS)
def test_records_are_copied(stories: Path, way: str) -> None:
    with kvg.GgufFile(stories) as file:
        records = [
            kvg.devices(),
            kvg.library_info(),
            file.model_info(),
            file.tensors,
            kvg.plan_memory(stories, "cpu"),
            kvg.abilities(stories, "cpu"),
            kvg.ContextShift(4, 5, on_shift=print),
            kvg.ShiftReport(0, 1, 2, 3, kvg.UpdateStats(1, 2, 3, 4, 5, 6.0)),
            kvg.Piece("a", 1, -0.5, None),
            kvg.CellGroup("full", (0,), 1, 0, 2, 3, 4),
        ]
    for record in records:
        assert WAYS[way](record) == record


@pytest.mark.parametrize("way", WAYS)
def test_a_view_of_the_cells_is_copied(tiny: kvg.Model, way: str) -> None:
    with open_context(tiny, n_ctx=64, n_seq_max=2) as ctx:
        ctx.append(1)
        view = ctx.kv.cells()
    other = WAYS[way](view)
    for name in ("pos", "seq", "shift", "dither"):
        assert np.array_equal(getattr(other, name), getattr(view, name))

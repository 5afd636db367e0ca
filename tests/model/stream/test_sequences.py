"""A sequence that travels is the same one at the other end, whatever cells and layers it went through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import open_context
from support.models import TWO_GROUPS, ModelSpec
from support.recurrent import SPECS
from support.streams import connect, fill_with_holes, greedy, travel

import pykvgraph as kvg
from pykvgraph import stream

DEPTHS = [1, 2, 3, 5]
N_LAYER = 12
N = 40
OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": 16,
    "n_seq_max": 4,
    "checkpoint_cells": 40,
    "defrag_threshold": -1,
}
F16, Q8_0 = {"type_k": "f16", "type_v": "f16"}, {"type_k": "q8_0", "type_v": "q8_0"}
LLAMA = ArchSpec("llama", N_LAYER, 64, 2, 1, 32, 32)
GEMMA = ArchSpec("gemma3", N_LAYER, 64, 2, 1, 32, 32, window=8)
QWEN = ArchSpec("qwen35", n_layer=N_LAYER, period=4, state_heads=4)
CASES = [(LLAMA, F16), (LLAMA, Q8_0), (LLAMA, {"type_k": "q8_0", "type_v": "f16"}), (GEMMA, F16), (QWEN, F16)]


def case_id(case: tuple[ArchSpec, dict[str, str]]) -> str:
    return f"{case[0].arch}-{case[1]['type_k']}-{case[1]['type_v']}"


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def case(
    request: pytest.FixtureRequest, architecture: Callable[[ArchSpec], Path]
) -> Iterator[tuple[kvg.Model, dict[str, Any]]]:
    spec, types = request.param
    with kvg.Model(architecture(spec)) as model:
        yield model, {**OPTIONS, **types}


def rows_by_position(ctx: kvg.Context, seq: int) -> list[Any]:
    """K and V of each layer, read cell by cell, in the order of positions."""
    found = []
    for index, group in enumerate(ctx.kv.groups):
        if group.kind == "state":
            continue
        view = ctx.kv.cells(index)
        cells = [int(cell) for cell in np.flatnonzero(view.seq[:, seq])]
        cells.sort(key=lambda cell: int(view.pos[cell]))
        for layer in group.layers:
            found += [ctx.kv.read_k(layer)[cells], ctx.kv.read_v(layer)[cells]]
    return found


@pytest.mark.parametrize(
    "p, q",
    [
        (p, q) if (p, q) == (2, 3) else pytest.param(p, q, marks=pytest.mark.slow)
        for p in DEPTHS
        for q in DEPTHS
    ],
)
@pytest.mark.parametrize("kind", ["memory", "device"])
def test_any_split_to_any_other(case: tuple[kvg.Model, dict[str, Any]], p: int, q: int, kind: str) -> None:
    """Byte for byte, and the texts that go on there are the same."""
    model, options = case
    with open_context(model, **options) as source, open_context(model, **options) as target:
        fill_with_holes(source, N, 10 * p + q)
        fill_with_holes(target, 20, p + 10 * q, 3)
        source.kv.checkpoint(0)
        fill_more(source)
        source.kv.set_pending_token(0, 9)
        before = target.kv.save(3)
        travel(source, 0, target, 1, connect(N_LAYER, p, q, kind), level=(p + q) % 4)
        assert target.kv.save(1) == source.kv.save(0)
        assert target.kv.save(3) == before
        for ours, theirs in zip(rows_by_position(source, 0), rows_by_position(target, 1), strict=True):
            assert np.array_equal(ours, theirs)
        assert greedy(target, 1, 4) == greedy(source, 0, 4)


def fill_more(ctx: kvg.Context) -> None:
    greedy(ctx, 0, 3)


@pytest.mark.parametrize("spec", [*SPECS, TWO_GROUPS], ids=str)
@pytest.mark.parametrize(("level", "kind"), [(0, "memory"), (1, "memory"), (0, "device"), (1, "device")])
def test_every_kind_of_layer(
    architecture: Callable[[ArchSpec], Path],
    model_file: Callable[[ModelSpec], Path],
    spec: ArchSpec | ModelSpec,
    level: int,
    kind: str,
) -> None:
    path = architecture(spec) if isinstance(spec, ArchSpec) else model_file(spec)
    with (
        kvg.Model(path) as model,
        open_context(model, **OPTIONS) as source,
        open_context(model, **OPTIONS) as target,
    ):
        fill_with_holes(source, N, 3)
        fill_with_holes(target, 20, 4, 3)
        travel(source, 0, target, 0, connect(model.n_layer, 2, 3, kind), level)
        assert target.kv.save(0) == source.kv.save(0)
        assert greedy(target, 0, 4) == greedy(source, 0, 4)


@pytest.mark.parametrize("kind", ["memory", "device"])
def test_what_waits_for_its_k_shift(
    small: kvg.Model, holder: Callable[[tuple[str, str]], kvg.Model], kind: str
) -> None:
    """Its K is rotated on the way, as in a save; here it still waits."""
    model = holder(("q8_0", "q8_0"))
    options = {**OPTIONS, **Q8_0, "n_ctx": 512}
    with open_context(model, **options) as source, open_context(model, **options) as target:
        fill_with_holes(source, 150, 5)
        source.kv.seq_rm(0, 3, 40)
        source.kv.seq_add(0, 40, -1, -37)
        source.kv.update()
        travel(source, 0, target, 2, connect(model.n_layer, kind=kind))
        assert target.kv.save(2) == source.kv.save(0)
        assert source.kv.cells().shift.any()


def test_positions_with_gaps_and_an_empty_sequence(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, N, 6)
        source.kv.seq_rm(0, 10, 20)
        travel(source, 0, target, 1, connect(2, 2))
        assert target.kv.save(1) == source.kv.save(0)
        travel(source, 3, target, 2, connect(2))
        assert target.kv.seq_pos_max(2) == -1


@pytest.mark.parametrize("kind", ["memory", "device"])
def test_a_cache_that_keeps_every_position_to_one_that_does_not(
    architecture: Callable[[ArchSpec], Path], kind: str
) -> None:
    with (
        kvg.Model(architecture(GEMMA)) as model,
        open_context(model, swa_full=True, **OPTIONS) as source,
        open_context(model, **OPTIONS) as target,
    ):
        fill_with_holes(source, 100, 8)
        travel(source, 0, target, 1, connect(N_LAYER, 2, 2, kind))
        assert target.kv.groups[1].n_cells < 100
        assert greedy(target, 1, 4) == greedy(source, 0, 4)


def test_one_layout_carries_one_sequence_after_another(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, N, 9)
        ends = connect(2, 1, 2)
        for seq in (0, 2):
            travel(source, seq, target, seq, ends, level=seq // 2)
            assert target.kv.save(seq) == source.kv.save(seq)


def runs_in(ctx: kvg.Context, group: int, seq: int) -> int:
    """How often the next position is not in the next cell, and the first one."""
    view = ctx.kv.cells(group)
    cells = sorted(np.flatnonzero(view.seq[:, seq]).tolist(), key=lambda cell: int(view.pos[cell]))
    return sum(1 for i, cell in enumerate(cells) if i == 0 or cell != cells[i - 1] + 1)


@pytest.mark.parametrize(
    ("level", "kind"),
    [(0, "memory"), (1, "memory"), (2, "memory"), (3, "memory"), (0, "device"), (1, "device")],
)
def test_how_many_regions(architecture: Callable[[ArchSpec], Path], level: int, kind: str) -> None:
    """A header and a table; K and V of each layer, whole or run by run; a header. Packed: one of both."""
    with (
        kvg.Model(architecture(GEMMA)) as model,
        open_context(model, **OPTIONS) as source,
        open_context(model, **OPTIONS) as target,
    ):
        fill_with_holes(source, N, 11)
        ends = connect(N_LAYER, 1, 5, kind)
        layout = ends.out[0]
        told = stream.n_flushes(source, 0, layout, level)
        travel(source, 0, target, 0, ends, level)
        for transport, layers in layout.parts:
            wanted = 3
            for layer in layers:
                group = next(i for i, each in enumerate(source.kv.groups) if layer in each.layers)
                each = 2 * runs_in(source, group, 0) if level == 0 else 2
                wanted += 1 if kind == "device" and level > 0 else each
            assert transport.flushes == wanted == told[transport]
        assert runs_in(source, 1, 0) > 5


def test_the_level_of_the_environment(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_context(small, **OPTIONS) as source:
        fill_with_holes(source, N, 12)
        (layout,), _ = connect(2)
        packed = stream.n_flushes(source, 0, layout, 3)
        assert stream.n_flushes(source, 0, layout) == packed
        monkeypatch.setenv("KVGRAPH_STREAM_LEVEL", "0")
        assert stream.n_flushes(source, 0, layout) == stream.n_flushes(source, 0, layout, 0) != packed
        monkeypatch.setenv("KVGRAPH_STREAM_LEVEL", "4")
        with pytest.raises(kvg.InvalidArgumentError, match="KVGRAPH_STREAM_LEVEL"):
            stream.n_flushes(source, 0, layout)

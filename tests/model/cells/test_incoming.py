"""Rows that come in piece by piece, while the context decodes: reserved, written, shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.engines import decode, open_context, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB, SMALL, TWO_GROUPS, WIDE, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

IDS = random_ids(60, N_VOCAB)
OPTIONS = {"n_ctx": 128, "n_seq_max": 3}


@pytest.fixture(scope="module", params=[SMALL, TWO_GROUPS], ids=["one group", "two groups"])
def model(request: pytest.FixtureRequest, model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(model_file(request.param), device=where.device) as opened:
        yield opened


def cells_of(kv: kvg.KVCache, group: int, seq: int) -> list[int]:
    """By position."""
    view = kv.cells(group)
    seen = np.flatnonzero(view.seq[:, seq])
    return [int(cell) for cell in seen[np.argsort(view.pos[seen])]]


def transfer(source: kvg.Context, target: kvg.Context, n: int, seq: int) -> None:
    """Positions 0 to n - 1 of the source's sequence 0, layer by layer and in two pieces."""
    places = [kvg.Place(range(n)) for _ in source.kv.groups]
    incoming = target.kv.reserve(places)
    for index, group in enumerate(source.kv.groups):
        cells = cells_of(source.kv, index, 0)[:n]
        for layer in range(len(group.layers)):
            for piece in (range(n // 3), range(n // 3, n)):
                part = [cells[i] for i in piece]
                rows = source.kv.read_rows(part, group=index, layers=range(layer, layer + 1))
                incoming.write(index, range(layer, layer + 1), piece, rows.data)
    incoming.show(seq)


def test_what_came_in_is_what_was_decoded(model: kvg.Model) -> None:
    with open_context(model, **OPTIONS) as source, open_context(model, **OPTIONS) as target:
        decode(source, run_of(IDS[:40]))
        decode(target, run_of(IDS[40:50]))
        target.kv.seq_rm(0, 2, 5)
        transfer(source, target, 40, 2)
        ours = decode(target, run_of(IDS[50:], 40, (2,)))
        theirs = decode(source, run_of(IDS[50:], 40))
        assert nmse(ours, theirs) <= where.rule(1e-6)


@pytest.mark.parametrize("policy", ["fill", "sort"])
def test_reserved_cells_stay_where_they_are(model: kvg.Model, policy: str) -> None:
    with open_context(model, defrag_threshold=-1, **OPTIONS) as ctx:
        decode(ctx, run_of(IDS[:20]))
        ctx.kv.seq_cp(0, 1, 0, 10)
        incoming = ctx.kv.reserve([kvg.Place(range(8)) for _ in ctx.kv.groups])
        places = np.flatnonzero((ctx.kv.cells().pos >= 0) & ~ctx.kv.cells().seq.any(axis=1)).tolist()
        assert len(places) == 8
        decode(ctx, run_of(IDS[20:40], 20))
        ctx.kv.seq_rm(0, 3, 15)
        held = {seq: sorted(ctx.kv.cells().pos[cells_of(ctx.kv, 0, seq)].tolist()) for seq in range(2)}
        ctx.kv.defrag("sort" if policy == "sort" else "fill")
        assert ctx.kv.update().moved_cells > 0
        for group in range(len(ctx.kv.groups)):
            view = ctx.kv.cells(group)
            assert view.pos[places].tolist() == list(range(8))
            assert not view.seq[places].any()
            # around them the others are compact
            assert ctx.kv.groups[group].n_kv == max(places[-1] + 1, ctx.kv.n_used)
        now = {seq: sorted(ctx.kv.cells().pos[cells_of(ctx.kv, 0, seq)].tolist()) for seq in range(2)}
        assert now == held
        incoming.give_back()
        assert ctx.kv.n_used == len({cell for seq in range(2) for cell in cells_of(ctx.kv, 0, seq)})


def test_written_while_another_thread_decodes(model: kvg.Model) -> None:
    with open_context(model, **OPTIONS) as source, open_context(model, **OPTIONS) as target:
        decode(source, run_of(IDS[:30]))
        expected = [decode(source, run_of([token], 30 + i))[0] for i, token in enumerate(IDS[30:40])]
        source.kv.seq_rm(0, 30, -1)
        go_on = threading.Event()

        def loop() -> None:
            position = 0
            while not go_on.is_set() and position < 60:
                decode(target, run_of([IDS[position % 60]], position))
                position += 1

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            transfer(source, target, 30, 1)
        finally:
            go_on.set()
            thread.join()
        ours = [decode(target, run_of([token], 30 + i, (1,)))[0] for i, token in enumerate(IDS[30:40])]
        assert nmse(np.stack(ours), np.stack(expected)) <= where.rule(1e-6)


def test_groups_get_the_same_positions(model_file: Callable[[ModelSpec], Path]) -> None:
    """Else one group would do what another refuses."""
    with (
        kvg.Model(model_file(TWO_GROUPS), device=where.device) as model,
        open_context(model, **OPTIONS) as ctx,
    ):
        for first, second in ((range(4), range(6)), (range(6), range(4)), ([0, 1], [0, 2]), ([], [0])):
            with pytest.raises(kvg.InvalidArgumentError, match="groups 0 and 1 get other positions"):
                ctx.kv.reserve([kvg.Place(first), kvg.Place(second)])
        assert ctx.kv.n_free == OPTIONS["n_ctx"]


WRONG: Any = ["x", "y"]


@pytest.mark.parametrize(
    "places",
    [
        3,
        None,
        [1],
        [([0, 1], None)],
        [kvg.Place(range(2), dither=np.array([1, 300]))],
        [kvg.Place(range(2), dither=WRONG)],
        [kvg.Place(range(2), dither=np.array([1.5, 2]))],
    ],
)
def test_places_of_wrong_types(model: kvg.Model, places: Any) -> None:
    with open_context(model, **OPTIONS) as ctx:
        n_groups = len(ctx.kv.groups)
        with pytest.raises(kvg.InvalidArgumentError, match="places"):
            ctx.kv.reserve(places * n_groups if isinstance(places, list) else places)
        assert ctx.kv.n_used == 0


@pytest.mark.parametrize(
    "layers",
    [0, None, (0, 1), slice(0, 1), range(0, 2, 2), range(1, 0), range(-1, 0), range(2**64, 2**64 + 1)],
)
def test_ranges_of_wrong_types(model: kvg.Model, layers: Any) -> None:
    """A start beyond 64 bits would be taken for 0."""
    n_groups = len({layer.group for layer in model.layers})
    with open_context(model, **OPTIONS) as ctx:
        row = ctx.kv.read_rows([0], layers=range(1)).data
        incoming = ctx.kv.reserve([kvg.Place([0])] * n_groups)
        with pytest.raises(kvg.InvalidArgumentError, match="layer"):
            incoming.write(0, layers, range(1), row)
        with pytest.raises(kvg.InvalidArgumentError, match="cell"):
            incoming.write(0, range(1), layers, row)
        if layers is not None:
            with pytest.raises(kvg.InvalidArgumentError, match="layer"):
                ctx.kv.read_rows([0], layers=layers)
        with pytest.raises(kvg.InvalidArgumentError, match="layers"):
            ctx.kv.read_rows([0], layers=range(10**12))
        several: list[Any] = [None, "text", [1, 2], np.repeat(row, 2)[::2]]
        for data in several:
            with pytest.raises(kvg.InvalidArgumentError, match="data must be bytes without gaps"):
                incoming.write(0, range(1), range(1), data)
        with pytest.raises(kvg.InvalidArgumentError, match="0 of 1 rows of layer 0"):
            incoming.show(0)


def test_calls_on_the_context_do_not_wait_for_a_write(model_file: Callable[[ModelSpec], Path]) -> None:
    n = 512
    with (
        kvg.Model(model_file(WIDE), device="cpu") as model,
        open_context(model, n_ctx=n, type_k="f32", type_v="f32") as ctx,
        ctx.kv.reserve([kvg.Place(range(n))]) as incoming,
    ):
        rows = np.zeros(n * ctx.kv.read_rows([0]).data.size, np.uint8)  # 64 MB
        stop = threading.Event()
        writes, calls = [], []

        def write() -> None:
            while not stop.is_set():
                start = time.perf_counter()
                incoming.write(0, range(1), range(n), rows)
                writes.append(time.perf_counter() - start)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(40):
                time.sleep(0.002)
                start = time.perf_counter()
                ctx.kv.seq_count(0, 0, -1)
                calls.append(time.perf_counter() - start)
        finally:
            stop.set()
            thread.join()
        assert np.median(calls) < np.median(writes) / 8


def test_refusals_change_nothing(model: kvg.Model) -> None:
    n_groups = len({layer.group for layer in model.layers})
    with open_context(model, **OPTIONS) as ctx, open_context(model, **OPTIONS) as other:
        decode(ctx, run_of(IDS[:20]))
        with pytest.raises(kvg.CacheFullError):
            ctx.kv.reserve([kvg.Place(range(109))] * n_groups)
        with pytest.raises(kvg.InvalidArgumentError, match="rise"):
            ctx.kv.reserve([kvg.Place([3, 3])] * n_groups)
        with pytest.raises(kvg.InvalidArgumentError, match="n_groups"):
            ctx.kv.reserve([kvg.Place(range(4))] * (n_groups + 1))
        with pytest.raises(kvg.InvalidArgumentError, match="dither"):
            ctx.kv.reserve([kvg.Place(range(4), np.zeros(3, np.uint8))] * n_groups)
        assert ctx.kv.n_used == 20
        incoming = ctx.kv.reserve([kvg.Place(range(4))] * n_groups)
        with pytest.raises(kvg.InvalidArgumentError, match="rows of layer 0"):
            incoming.show(1)
        half = ctx.kv.read_rows(cells_of(ctx.kv, 0, 0)[:2], layers=range(1)).data
        for _ in range(2):  # the same rows twice are not all of them
            incoming.write(0, range(1), range(2), half)
        with pytest.raises(kvg.InvalidArgumentError, match="2 of 4 rows of layer 0"):
            incoming.show(1)
        with pytest.raises(kvg.InvalidArgumentError, match="bytes"):
            incoming.write(0, range(1), range(4), b"short")
        for arguments in (
            (n_groups, range(1), range(4)),
            (0, range(9), range(4)),
            (0, range(1), range(2, 9)),
        ):
            with pytest.raises(kvg.InvalidArgumentError):
                incoming.write(*arguments, b"")
        transfer(ctx, ctx, 4, 1)
        other_incoming = other.kv.reserve([kvg.Place(range(4))] * n_groups)
        other.kv.clear()
        assert other.kv.n_used == 0
        with pytest.raises(kvg.InvalidArgumentError, match="cleared"):
            other_incoming.show(0)
        with pytest.raises(kvg.InvalidArgumentError, match="cleared"):
            other_incoming.write(0, range(1), range(0), b"")
        with pytest.raises(kvg.InvalidArgumentError, match="positions up to 19"):
            transfer(ctx, ctx, 4, 0)


def test_cells_of_a_reservation_that_is_dropped_come_back(model: kvg.Model) -> None:
    n_groups = len({layer.group for layer in model.layers})
    with open_context(model, **OPTIONS) as ctx:
        incoming = ctx.kv.reserve([kvg.Place(range(100))] * n_groups)
        assert ctx.kv.n_free == 28
        incoming.close()
        decode(ctx, run_of(IDS[:60]))  # the next call finds the room
        assert ctx.kv.n_used == 60
        kept = ctx.kv.reserve([kvg.Place(range(8))] * n_groups)
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        kept.show(0)
    kept.close()

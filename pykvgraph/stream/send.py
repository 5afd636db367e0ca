"""A sequence leaves: `stream_out`, and how many regions that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from pykvgraph import env
from pykvgraph.checks import integer
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.saved.device_rows import PackedRows
from pykvgraph.kv_cache.saved.transfer import Chosen, PendingOf, choose, take_table
from pykvgraph.stream.header import HEADER_KEY, TABLE_KEY, MessageHeader, MessageKind
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.shape import Shape
from pykvgraph.stream.steps import Region, end, layer_rows, pack_runs, runs_of
from pykvgraph.stream.transports.device import DeviceTransport
from pykvgraph.stream.transports.transport import Transport

if TYPE_CHECKING:
    from pykvgraph.stream.transports.transport import Bytes

MOST = 3
TOGETHER_BYTES = 1 << 20


def level_of(level: int | None) -> int:
    """What was asked for, or what KVGRAPH_STREAM_LEVEL says. Raises InvalidArgumentError."""
    return env.stream_level() if level is None else integer(level, "level", 0, MOST)


def stream_out(ctx: Context, seq: int, layout: Layout, level: int | None = None) -> None:
    """Sends a sequence as it is: its cells in every group, checkpoints, states, pending token.

    Nothing is changed here. Other calls on the context wait meanwhile. At the other end `stream_in` takes it.

    level: 0: a region for each run of neighbouring cells, in K and V of each layer. From 1 on: their rows are
    packed, and K and V of a layer are a region each. What levels 2 and 3 do besides needs a decode behind
    which they can hide: `following`. None: as the environment variable KVGRAPH_STREAM_LEVEL says, else 3.

    Raises InvalidArgumentError, TransportError when the other end is gone, and DeviceError as `kv.save` does.
    After an error the transports are closed.
    """
    in_runs = level_of(level) == 0
    shape = shape_for(ctx, layout, whole=False)
    seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
    try:
        ctx.kv._handle.call(
            lambda context: flush(
                whole(context, shape, seq, ctx.kv._pending.saved, layout, in_runs), together=not in_runs
            )
        )
        flush(end(layout))
    except BaseException:
        layout.close()
        raise


def n_flushes(ctx: Context, seq: int, layout: Layout, level: int | None = None) -> dict[Transport, int]:
    """How many regions stream_out() would flush over each transport: two headers, a table, and rows."""
    shape = shape_for(ctx, layout, whole=False)
    seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
    chosen = ctx.kv._handle.call(choose, seq, ctx.kv._pending.saved)
    in_runs = level_of(level) == 0
    regions = [len(each) for each in _runs(chosen)] if in_runs else [1] * len(shape.room)

    def of(transport: Transport, layer: int) -> int:
        rows = shape.rows.get(layer, ())
        return sum(
            regions[row.group]
            for row in (rows[:1] if isinstance(transport, DeviceTransport) and not in_runs else rows)
        )

    return {
        transport: 3 + sum(of(transport, layer) for layer in layers) for transport, layers in layout.parts
    }


def shape_for(ctx: Context, layout: Layout, *, whole: bool) -> Shape:
    """Raises InvalidArgumentError where the layout doesn't fit."""
    if not isinstance(ctx, Context):
        raise InvalidArgumentError(f"ctx must be a pykvgraph.Context, got {type(ctx).__name__}")
    if not isinstance(layout, Layout):
        raise InvalidArgumentError(f"layout must be a stream.Layout, got {type(layout).__name__}")
    shape: Shape = ctx.kv._handle.call(Shape, ctx.kv._saved_geometry)
    shape.check(layout, whole=whole)
    return shape


def flush(regions: Iterable[Region], *, together: bool = False) -> None:
    """Raises TransportError.

    together: those that follow each other over one transport go in one call, about TOGETHER_BYTES at a time.
    """
    waiting: list[Region] = []
    n_bytes = 0
    for region in regions:
        fits = together and n_bytes < TOGETHER_BYTES and not isinstance(region.data, PackedRows)
        if waiting and not (fits and waiting[0].transport is region.transport):
            _flush_all(waiting)
            waiting, n_bytes = [], 0
        if isinstance(region.data, PackedRows):
            cast("DeviceTransport", region.transport).flush_rows(region.key, region.data)
        else:
            waiting.append(region)
            n_bytes += region.n_bytes
    _flush_all(waiting)


def _flush_all(regions: Sequence[Region]) -> None:
    """Of one transport."""
    if regions:
        regions[0].transport.flush_all((region.key, cast("Bytes", region.data)) for region in regions)


def whole(
    context: int, shape: Shape, seq: int, pending: PendingOf, layout: Layout, in_runs: bool
) -> Iterator[Region]:
    """A message WHOLE: tables over all transports, and then rows, layer by layer."""
    chosen = choose(context, seq, pending)
    runs = _runs(chosen) if in_runs else None
    yield from _tables(context, shape, layout, chosen, runs)
    cells = [np.concatenate(both) for both in chosen.cells]
    yield from layer_rows(context, shape, layout, cells, runs, packed=not in_runs)


def _tables(
    context: int, shape: Shape, layout: Layout, chosen: Chosen, runs: list[list[int]] | None
) -> Iterator[Region]:
    for transport, layers in layout.parts:
        table = take_table(context, shape.of(layers), chosen, shape.columns_of(layers))
        if runs is not None:
            table = pack_runs(runs) + table
        yield Region(
            transport,
            HEADER_KEY,
            MessageHeader(MessageKind.WHOLE, runs is not None, n_bytes=len(table)).pack(),
        )
        yield Region(transport, TABLE_KEY, table)


def _runs(chosen: Chosen) -> list[list[int]]:
    return [runs_of(np.concatenate(both)) for both in chosen.cells]

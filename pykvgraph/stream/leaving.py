"""A sequence leaves: `stream_out`, and how many regions that is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pykvgraph import env
from pykvgraph.checks import integer
from pykvgraph.context import Context
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.incoming import read_rows
from pykvgraph.pending import PendingTokens
from pykvgraph.state.transfer import Chosen, choose, take_table
from pykvgraph.stream.front import TABLE_KEY, Front, Kind
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.runs import pack_runs, pieces, runs_of
from pykvgraph.stream.shape import Row, Shape
from pykvgraph.stream.transport import Transport

Runs = list[list[int] | None]  # of each group; None: rows go in one region
MOST = 3


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
        ctx.kv._handle.call(send_whole, shape, seq, ctx.kv._pending, layout, in_runs)
        send_end(layout)
    except BaseException:
        layout.close()
        raise


def n_flushes(ctx: Context, seq: int, layout: Layout, level: int | None = None) -> dict[Transport, int]:
    """How many regions stream_out() would flush over each transport: a front, a table, rows, a last front."""
    shape = shape_for(ctx, layout, whole=False)
    seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
    chosen = ctx.kv._handle.call(choose, seq, ctx.kv._pending)
    runs = _runs(chosen, level_of(level) == 0)
    regions = [1 if each is None else len(each) for each in runs]
    return {
        transport: 3 + sum(regions[row.group] for layer in layers for row in shape.rows.get(layer, ()))
        for transport, layers in layout.parts
    }


def shape_for(ctx: Context, layout: Layout, *, whole: bool) -> Shape:
    """Raises InvalidArgumentError where the layout doesn't fit."""
    if not isinstance(layout, Layout):
        raise InvalidArgumentError(f"layout must be a stream.Layout, got {type(layout).__name__}")
    shape: Shape = ctx.kv._handle.call(Shape)
    shape.check(layout, whole=whole)
    return shape


def send_whole(
    context: int, shape: Shape, seq: int, pending: PendingTokens, layout: Layout, in_runs: bool
) -> None:
    """A message WHOLE: tables over all transports, and then rows, layer by layer."""
    chosen = choose(context, seq, pending)
    runs = _runs(chosen, in_runs)
    for transport, layers in layout.parts:
        table = take_table(context, shape.of(layers), chosen, shape.columns_of(layers))
        if in_runs:
            table = pack_runs([each or [] for each in runs]) + table
        Front(Kind.WHOLE, in_runs, n_bytes=len(table)).send(transport)
        transport.flush(TABLE_KEY, table)
    cells = [np.concatenate(both) for both in chosen.cells]
    send_rows(context, shape, layout, cells, runs)


def send_rows(
    context: int, shape: Shape, layout: Layout, cells: list[npt.NDArray[np.int32]], runs: Runs
) -> None:
    """K and V of these cells of each group, layer by layer, each over its transport."""
    over = {layer: transport for transport, layers in layout.parts for layer in layers}
    for layer in sorted(over.keys() & shape.rows.keys()):
        k, v = shape.rows[layer]
        chosen = cells[k.group]
        both = read_rows(context, k.group, range(k.place, k.place + 1), chosen, k.n_bytes + v.n_bytes).data
        middle = len(chosen) * k.n_bytes
        for row, data in ((k, both[:middle]), (v, both[middle:])):
            flush_rows(over[layer], row, data, runs[row.group])


def flush_rows(transport: Transport, row: Row, data: npt.NDArray[np.uint8], runs: list[int] | None) -> None:
    """data: a row for each cell. runs None: in one region."""
    n = len(data) // row.n_bytes if row.n_bytes else 0
    for ending, part in pieces(runs, n):
        transport.flush(key_of(row) + ending, data[part.start * row.n_bytes : part.stop * row.n_bytes])


def key_of(row: Row) -> str:
    """Of the region of a layer's K or V."""
    return f"{row.layer}:{row.name}"


def send_end(layout: Layout) -> None:
    """Nothing follows."""
    for transport, _ in layout.parts:
        Front(Kind.END).send(transport)


def _runs(chosen: Chosen, in_runs: bool) -> Runs:
    return [runs_of(np.concatenate(both)) if in_runs else None for both in chosen.cells]

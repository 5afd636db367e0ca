"""Rows of a part of a sequence in chunks: `scatter`, and `gather` into empty cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import integer
from pykvgraph.context.context import Context
from pykvgraph.errors import StateError, UnsupportedError
from pykvgraph.kv_cache.reserved_cells import Incoming, Place, read_rows
from pykvgraph.kv_cache.saved.rows import require_finite
from pykvgraph.kv_cache.saved.transfer import take_part_table
from pykvgraph.stream.header import HEADER_KEY, TABLE_KEY, MessageHeader, MessageKind
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.receive import (
    filled,
    neighbours,
    receive_cells,
    receive_headers,
    reserved,
    write_layers,
)
from pykvgraph.stream.send import flush, shape_for
from pykvgraph.stream.shape import RowFormat, Shape
from pykvgraph.stream.steps import NewCells, Region, new_cells
from pykvgraph.stream.transports.transport import Transport

CHUNK = 100  # cells whose rows are one region, as in DejaVu's library (arXiv 2403.01876)


def scatter(ctx: Context, seq: int, layout: Layout, p0: int = 0, p1: int = -1) -> None:
    """Sends K and V of a sequence's positions [p0, p1), wherever their cells are. p1 < 0: to its end.

    Rows of 100 cells at a time are packed into one region. Over each transport go a header, a table, and then
    of each group of which it has layers as many regions as it takes. At the other end `gather` takes them.
    Positions that a window has lost, and states of recurrent layers, are not sent: `stream_out` sends all
    that a sequence has. A pending K-shift is done first. Here nothing else changes.

    Raises InvalidArgumentError before anything is sent. After these errors the transports are closed:
    TransportError when the other end is gone, UnsupportedError where cells share a position (seq_div), and
    DeviceError as `kv.save` does.
    """
    shape = shape_for(ctx, layout, whole=False)
    seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
    p0, p1 = integer(p0, "p0", 0), integer(p1, "p1")
    try:
        ctx.kv._handle.call(lambda context: flush(_part(context, shape, layout, seq, p0, p1), together=True))
    except BaseException:
        layout.close()
        raise


def gather(ctx: Context, layout: Layout) -> Incoming:
    """Takes what `scatter` sends, into any empty cells, which no sequence sees yet.

    layout: all layers that have K and V. `show(seq)` of what is returned gives the cells to a sequence that
    ends before them, `show_text(seq)` where layers have windows; `close()` makes them empty again.

    Raises InvalidArgumentError for a layout that lacks a layer, before anything is fetched. After these
    errors nothing was changed, and the transports are closed: TransportError; StateError for what comes from
    another model or a cache of another kind, says what can't be, or isn't finite; CacheFullError when there
    are too few empty cells.
    """
    shape = shape_for(ctx, layout, whole=True)
    try:
        headers = receive_headers(layout)
        if headers[0].kind != MessageKind.PART:
            raise StateError("the stream has no part of a sequence: stream_in() takes it")
        saved, _ = receive_cells(layout, shape, headers, ctx.n_ctx, with_states=False)
        cells = reserved(ctx, [Place(each.pos.tolist(), each.dither) for each in saved.groups])
        n_cells = [len(each.pos) for each in saved.groups]
        return filled(cells, layout, lambda *part: _fetch(cells, shape, n_cells, *part))
    except BaseException:
        layout.close()
        raise


def _part(context: int, shape: Shape, layout: Layout, seq: int, p0: int, p1: int) -> Iterator[Region]:
    chosen = [_before(new_cells(context, seq, index, p0), p1) for index in range(len(shape.room))]
    if any((np.diff(each.positions) == 0).any() for each in chosen):
        raise UnsupportedError(
            "cells of the sequence share a position (composite cells, or seq_div): use stream_out()"
        )
    for transport, layers in layout.parts:
        geometry = shape.of(layers, with_states=False)
        table = take_part_table(
            context, geometry, [each.cells for each in chosen], [each.positions for each in chosen]
        )
        yield Region(transport, HEADER_KEY, MessageHeader(MessageKind.PART, n_bytes=len(table)).pack())
        yield Region(transport, TABLE_KEY, table)
    for transport, layers in layout.parts:
        for places, (k, v), group in shape.places(layers, chosen):
            for number, part in enumerate(_chunks(len(group.cells))):
                rows = [
                    read_rows(context, k.group, run, group.cells[part], k.n_bytes + v.n_bytes).data
                    for run in neighbours(places)
                ]
                yield Region(transport, _key(k, number), np.concatenate(rows))


def _fetch(
    cells: Incoming, shape: Shape, n_cells: Sequence[int], transport: Transport, layers: Sequence[int]
) -> None:
    for places, (k, v), n in shape.places(layers, n_cells):
        for number, part in enumerate(_chunks(n)):
            own = range(n)[part]
            layer_bytes = len(own) * (k.n_bytes + v.n_bytes)
            rows = np.empty((len(places), layer_bytes), np.uint8)
            transport.fetch(_key(k, number), rows)
            _require_finite(rows, k, v, len(own))
            write_layers(cells, k.group, places, own, rows)


def _require_finite(rows: npt.NDArray[np.uint8], k: RowFormat, v: RowFormat, n: int) -> None:
    """rows: (layers, K of n cells and then V of each). Raises StateError."""
    middle = n * k.n_bytes
    for row, own in ((k, rows[:, :middle]), (v, rows[:, middle:])):
        require_finite(np.ascontiguousarray(own).data, row.type, row.name.upper())


def _before(cells: NewCells, p1: int) -> NewCells:
    """Those of positions below p1; all of them where that is negative."""
    n = len(cells.positions) if p1 < 0 else int(np.searchsorted(cells.positions, p1))
    return NewCells(cells.cells[:n], cells.positions[:n])


def _chunks(n: int) -> Iterator[slice]:
    for begin in range(0, n, CHUNK):
        yield slice(begin, begin + CHUNK)


def _key(row: RowFormat, number: int) -> str:
    """Of a chunk of the row's group."""
    return f"group{row.group}:{number}"

"""A sequence arrives: `stream_in`. What comes is hostile until it is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import integer
from pykvgraph.context import Context
from pykvgraph.errors import CacheFullError, InvalidArgumentError, StateError
from pykvgraph.state.cells import SavedRows, SavedState
from pykvgraph.state.format import unpack
from pykvgraph.state.rows import require_finite
from pykvgraph.stream.front import TABLE_KEY, Front, Kind
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.leaving import Runs, key_of, shape_for
from pykvgraph.stream.runs import check_runs, pieces, take_runs
from pykvgraph.stream.shape import Row, Shape
from pykvgraph.stream.transport import Transport

_TABLE_BYTES = 1 << 22  # of a table, beside what cells and states take
_CELL_BYTES = 16  # of a cell in a table, and of its run


def stream_in(ctx: Context, seq: int, layout: Layout) -> None:
    """Takes what `stream_out` sends, into any empty cells of a sequence that has none.

    layout: all layers that have K and V or a state; which of them come over which transport is the same at
    both ends, and all the rest may differ: the number of the sequence, its cells, whether windows keep every
    position.

    All or nothing: after an error the sequence is empty, nothing else was changed, and the transports are
    closed. Raises InvalidArgumentError, before anything is fetched, for a sequence that has cells and for a
    layout that lacks a layer; TransportError; StateError for what comes from another model or a cache of
    another kind, says what can't be, or isn't finite; CacheFullError when there are too few empty cells.
    """
    shape = shape_for(ctx, layout, whole=True)
    seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
    if ctx.kv.seq_bounds().n_cells[seq]:
        raise InvalidArgumentError(f"sequence {seq} has cells: a stream goes into an empty sequence (seq_rm)")
    try:
        _receive(ctx, seq, layout, shape)
    except BaseException:
        layout.close()
        ctx.kv.seq_rm(seq, 0, -1)
        raise


def _receive(ctx: Context, seq: int, layout: Layout, shape: Shape) -> None:
    fronts = receive_fronts(layout)
    if fronts[0].kind != Kind.WHOLE:
        raise StateError("the stream doesn't begin with a sequence")
    ctx.kv._load(receive_whole(layout, shape, fronts, ctx.n_ctx), seq)
    if receive_fronts(layout)[0].kind != Kind.END:
        raise StateError("the stream goes on behind its end")


def receive_fronts(layout: Layout) -> list[Front]:
    """Of each transport; they begin the same message."""
    fronts = [Front.receive(transport) for transport, _ in layout.parts]
    if len({(front.kind, front.in_runs, front.first) for front in fronts}) > 1:
        raise StateError("the transports carry different streams")
    return fronts


def receive_whole(layout: Layout, shape: Shape, fronts: Sequence[Front], n_ctx: int) -> SavedState:
    """What follows the fronts of a message WHOLE."""
    states, runs = [], []
    for (transport, layers), front in zip(layout.parts, fronts, strict=True):
        table = memoryview(receive_table(transport, front, _most_bytes(shape, n_ctx)))
        own: Runs = [None] * len(shape.room)
        if front.in_runs:
            lengths, table = take_runs(table, len(shape.room))
            own = list(lengths)
        states.append(unpack(table, shape.of(layers), shape.room))
        runs.append(own)
    saved = _agreed(shape, layout, states, runs)
    for cells in saved.groups:
        if len(cells.pos) > 2 * n_ctx:  # those that are seen, and those that checkpoints hold
            raise CacheFullError(f"what comes has {len(cells.pos)} cells in a group; n_ctx is {n_ctx} here")
    n_cells = [len(cells.pos) for cells in saved.groups]
    if any(each is not None for each in runs[0]):
        for lengths_of, n in zip(runs[0], n_cells, strict=True):
            check_runs(lengths_of or [], n)
    rows = receive_rows(layout, shape, n_cells, runs[0])
    groups = tuple(replace(cells, rows=own) for cells, own in zip(saved.groups, rows, strict=True))
    return replace(saved, groups=groups)


def receive_table(transport: Transport, front: Front, most: int) -> bytearray:
    """Raises StateError for one that is larger than any can be."""
    if front.n_bytes > most:
        raise StateError(f"the stream's table has {front.n_bytes} bytes, more than this cache can take")
    table = bytearray(front.n_bytes)
    transport.fetch(TABLE_KEY, table)
    return table


def receive_rows(
    layout: Layout, shape: Shape, n_cells: Sequence[int], runs: Runs
) -> list[npt.NDArray[np.uint8]]:
    """Rows of so many cells of each group, as SavedCells has them. Each transport has a thread."""
    groups = [
        np.empty(n * group.cell_bytes, np.uint8)
        for n, group in zip(n_cells, shape.geometry.groups, strict=True)
    ]

    def fetch(transport: Transport, layers: Sequence[int]) -> None:
        for layer in layers:
            for row in shape.rows.get(layer, ()):
                place = place_of(shape, row, n_cells[row.group])
                fetch_rows(transport, row, groups[row.group][place], runs[row.group])

    each_transport(layout, fetch)
    return groups


def place_of(shape: Shape, row: Row, n_cells: int) -> slice:
    """Where the rows of a layer's K or V are among those of its group."""
    k, v = shape.rows[row.layer]
    begin = n_cells * (row.place * (k.n_bytes + v.n_bytes) + (k.n_bytes if row is v else 0))
    return slice(begin, begin + n_cells * row.n_bytes)


def fetch_rows(transport: Transport, row: Row, into: npt.NDArray[np.uint8], runs: list[int] | None) -> None:
    """The reverse of flush_rows. Raises StateError for what isn't finite."""
    n = len(into) // row.n_bytes if row.n_bytes else 0
    for ending, part in pieces(runs, n):
        transport.fetch(key_of(row) + ending, into[part.start * row.n_bytes : part.stop * row.n_bytes])
    require_finite(into.data, row.type, f"{row.name.upper()} in layer {row.layer}")


def each_transport(layout: Layout, fetch: Callable[[Transport, Sequence[int]], None]) -> None:
    """fetch(transport, layers) for each, side by side; when one fails, the others are closed."""
    if len(layout.parts) == 1:
        return fetch(*layout.parts[0])
    errors: list[BaseException] = []

    def fetch_or_close(part: tuple[Transport, Sequence[int]]) -> None:
        try:
            fetch(*part)
        except BaseException as error:
            errors.append(error)
            layout.close()

    with ThreadPoolExecutor(len(layout.parts)) as beside:
        list(beside.map(fetch_or_close, layout.parts))
    if errors:
        raise errors[0]


def _most_bytes(shape: Shape, n_ctx: int) -> int:
    """Of a table: of its cells, and of a state for each of some checkpoints."""
    return _TABLE_BYTES + len(shape.room) * 2 * n_ctx * _CELL_BYTES + 64 * shape.state_bytes


def _agreed(shape: Shape, layout: Layout, tables: Sequence[SavedState], runs: Sequence[Runs]) -> SavedState:
    """The one sequence that all tables tell of, with the states of all layers."""
    first = tables[0]
    if first.whole:
        raise StateError("the stream has a whole cache, not a sequence")
    if any(_told(table) != _told(first) for table in tables) or any(own != runs[0] for own in runs):
        raise StateError("the transports carry different sequences")
    if not shape.state_bytes:
        return first
    states: SavedRows | None = None
    for (_, layers), table in zip(layout.parts, tables, strict=True):
        if table.states is None:
            continue
        if states is None:
            empty = np.empty((len(table.states.rows), shape.state_bytes // 4), np.float32)
            states = SavedRows(table.states.owners, empty)
        if not np.array_equal(states.owners, table.states.owners) or len(states.rows) != len(
            table.states.rows
        ):
            raise StateError("the transports carry different states")
        states.rows[:, shape.columns_of(layers)] = table.states.rows
    return replace(first, states=states)


def _told(state: SavedState) -> tuple[object, ...]:
    """All but rows and states."""
    cells = [
        tuple(array.tobytes() for array in (each.pos, each.seq, each.kept, each.lost, each.dither))
        for each in state.groups
    ]
    return cells, state.checkpoints, state.pending, state.whole

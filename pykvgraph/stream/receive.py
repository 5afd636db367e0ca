"""A sequence arrives: `stream_in`. What comes is hostile until it is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import integer
from pykvgraph.context.context import Context
from pykvgraph.errors import CacheFullError, InvalidArgumentError, StateError
from pykvgraph.kv_cache.reserved_cells import Incoming, Place
from pykvgraph.kv_cache.saved.cells import SavedRows, SavedState
from pykvgraph.kv_cache.saved.device_rows import PackedGroup, PackedRows
from pykvgraph.kv_cache.saved.format import unpack
from pykvgraph.kv_cache.saved.rows import require_finite
from pykvgraph.stream.header import STATE_KEY, TABLE_KEY, MessageHeader, MessageKind
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.send import shape_for
from pykvgraph.stream.shape import RowFormat, Shape
from pykvgraph.stream.steps import State, check_runs, packed_key, read_step_table, take_runs
from pykvgraph.stream.transports.device import DeviceTransport
from pykvgraph.stream.transports.transport import Transport

_TABLE_BYTES = 1 << 22  # of a table, beside what cells and states take
_CELL_BYTES = 16  # of a cell in a table, and of its run

Runs = list[list[int]]  # of each group


def stream_in(ctx: Context, seq: int, layout: Layout) -> None:
    """Takes what `stream_out` or `following` sends, into any empty cells of a sequence that has none.

    layout: all layers that have K and V or a state; which of them come over which transport is the same at
    both ends, and all the rest may differ: the number of the sequence, its cells, whether windows keep every
    position. Returns when the stream has ended.

    All or nothing: after an error the sequence is empty, nothing else was changed, and the transports are
    closed. Raises InvalidArgumentError, before anything is fetched, for a sequence that has cells and for a
    layout that lacks a layer; TransportError; StateError for what comes from another model or a cache of
    another kind, says what can't be, or isn't finite; CacheFullError when there are too few empty cells;
    DeviceError when a device fails while rows are written: then the whole cache must be cleared.
    """
    coming = arrivals(ctx, seq, layout)
    try:
        for _ in coming:
            pass
    except BaseException:
        if coming.has_begun:
            ctx.kv.seq_rm(seq, 0, -1)
        raise


def arrivals(ctx: Context, seq: int, layout: Layout) -> SequenceReceiver:
    """What stream_in() does, step by step: an iterator of the sequence's last position after each message.

    After an error the sequence is as it was after the last step, and the transports are closed. It can go on
    there; in models with recurrent layers, after the last state that came. Raises as stream_in() does.
    """
    return SequenceReceiver(ctx, seq, layout)


class SequenceReceiver:
    """Takes a sequence that another end sends, step by step: what `arrivals` returns.

    has_begun: anything of the sequence may be here. text: the tokens that the sender has told. n_states: how
    many states of recurrent layers have come, each for what was the sequence's end then.
    """

    def __init__(self, ctx: Context, seq: int, layout: Layout) -> None:
        self.has_begun = False
        self.text: list[int] = []
        self.n_states = 0
        self._n_adapted = ctx.kv._n_adapted
        self._shape = shape_for(ctx, layout, whole=True)
        self._seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
        self._ctx = ctx
        self._layout = layout
        if ctx.kv.seq_bounds().n_cells[self._seq]:
            raise InvalidArgumentError(
                f"sequence {self._seq} has cells: a stream goes into an empty sequence (seq_rm)"
            )

    def __iter__(self) -> Iterator[int]:
        try:
            for headers in iter(self._headers, None):
                self._take(headers)
                yield self._ctx.kv.seq_pos_max(self._seq)
        except BaseException:
            self._layout.close()
            raise

    def _headers(self) -> list[MessageHeader] | None:
        """Of the next message; None: there is none."""
        headers = receive_headers(self._layout)
        if headers[0].kind == MessageKind.PART:
            raise StateError("the stream has a part of a sequence: gather() takes it")
        if headers[0].kind != MessageKind.WHOLE and not self.has_begun:
            raise StateError("the stream doesn't begin with a sequence")
        self.has_begun = True
        return None if headers[0].kind == MessageKind.END else headers

    def _take(self, headers: list[MessageHeader]) -> None:
        ctx, layout, shape = self._ctx, self._layout, self._shape
        if ctx.kv._n_adapted != self._n_adapted:
            raise InvalidArgumentError("the adapters have changed amid the stream: begin it anew")
        if headers[0].kind == MessageKind.TEXT:
            self._take_text(headers)
            return
        if headers[0].kind == MessageKind.WHOLE:
            ctx.kv._load(receive_whole(layout, shape, headers, ctx.n_ctx), self._seq)
            return
        first = headers[0].first
        if headers[0].with_state and not shape.state_bytes:
            raise StateError("the stream has a state, and the model has none")
        if ctx.kv.seq_pos_max(self._seq) >= first:
            ctx.kv.seq_rm(self._seq, first, -1)
        take = take_token if headers[0].kind == MessageKind.TOKEN else take_step
        with take(ctx, layout, shape, headers) as incoming:
            state = receive_state(layout, shape) if headers[0].with_state else None
            incoming.show(self._seq, state)
            self.n_states += state is not None

    def _take_text(self, headers: list[MessageHeader]) -> None:
        tables = [
            receive_table(transport, header, _TABLE_BYTES)
            for (transport, _), header in zip(self._layout.parts, headers, strict=True)
        ]
        said = np.frombuffer(tables[0], "<i4").tolist()
        if any(table != tables[0] for table in tables) or headers[0].first != len(self.text):
            raise StateError("the stream carries different texts, or a text with a gap")
        if len(self.text) + len(said) > _TABLE_BYTES // 4:
            raise StateError(f"the stream's text has more than {_TABLE_BYTES // 4} tokens")
        if said and not 0 <= min(said) <= max(said) < self._ctx.model.n_vocab:
            raise StateError("the stream's text has tokens that the model doesn't know")
        self.text += said


def take_step(ctx: Context, layout: Layout, shape: Shape, headers: Sequence[MessageHeader]) -> Incoming:
    """Rows of a message STEP, in cells that are reserved for them."""
    most = _TABLE_BYTES + len(shape.room) * 2 * ctx.n_ctx * _CELL_BYTES
    tables = []
    for (transport, _), header in zip(layout.parts, headers, strict=True):
        tables.append(receive_table(transport, header, most))
    if any(table != tables[0] for table in tables):
        raise StateError("the transports carry different steps")
    positions, runs = read_step_table(memoryview(tables[0]), headers[0], len(shape.room))
    incoming = reserved(ctx, [Place(each.tolist()) for each in positions])

    def fetch(transport: Transport, layers: Sequence[int]) -> None:
        for layer in layers:
            if layer not in shape.rows:
                continue
            k, v = shape.rows[layer]
            n, own = len(positions[k.group]), None if runs is None else runs[k.group]
            rows = np.empty(n * (k.n_bytes + v.n_bytes), np.uint8)
            fetch_rows(transport, k, rows[: n * k.n_bytes], own)
            fetch_rows(transport, v, rows[n * k.n_bytes :], own)
            incoming.write(k.group, range(k.place, k.place + 1), range(n), rows)

    return filled(incoming, layout, fetch)


def take_token(ctx: Context, layout: Layout, shape: Shape, headers: Sequence[MessageHeader]) -> Incoming:
    """The row of a message TOKEN, in cells that are reserved for it."""
    incoming = reserved(ctx, [Place([headers[0].first])] * len(shape.room))

    def fetch(transport: Transport, layers: Sequence[int]) -> None:
        parts = list(shape.places(layers, range(len(shape.room))))
        regions = []
        for which, name in enumerate("kv"):
            sizes = [len(places) * rows[which].n_bytes for places, rows, _ in parts]
            region = np.empty(sum(sizes), np.uint8)
            transport.fetch(name, region)
            regions.append(np.split(region, np.cumsum(sizes)[:-1]) if sizes else [])
        for (places, rows, group), k, v in zip(parts, *regions, strict=True):
            require_finite(k.data, rows[0].type, "K")
            require_finite(v.data, rows[1].type, "V")
            both = np.hstack([k.reshape(len(places), -1), v.reshape(len(places), -1)])
            write_layers(incoming, group, places, range(1), both)

    return filled(incoming, layout, fetch)


def reserved(ctx: Context, places: Sequence[Place]) -> Incoming:
    """Empty cells for what comes. Raises StateError for what the sender says and no sequence can have."""
    try:
        return ctx.kv.reserve(places)
    except InvalidArgumentError as error:
        raise StateError(f"the stream says what can't be: {error}") from None


def write_layers(
    incoming: Incoming, group: int, places: Sequence[int], cells: range, rows: npt.NDArray[np.uint8]
) -> None:
    """Rows of some layers of a group, in some of the reserved cells.

    places: of the layers in the group, in rising order. rows: uint8 (layers, bytes), K of each cell and then
    V of each.
    """
    begin = 0
    for run in neighbours(places):
        incoming.write(group, run, cells, rows[begin : begin + len(run)].ravel())
        begin += len(run)


def neighbours(places: Sequence[int]) -> Iterator[range]:
    """Places in rising order, as ranges."""
    begin = 0
    for i in range(1, len(places) + 1):
        if i == len(places) or places[i] != places[i - 1] + 1:
            yield range(places[begin], places[i - 1] + 1)
            begin = i


def filled(incoming: Incoming, layout: Layout, fetch: Callable[[Transport, Sequence[int]], None]) -> Incoming:
    """The same cells, when fetch(transport, layers) has written them; else they are given back."""
    try:
        each_transport(layout, fetch)
    except BaseException:
        incoming.close()
        raise
    return incoming


def receive_state(layout: Layout, shape: Shape) -> State:
    """Of all layers. Raises StateError for what isn't finite."""
    state = np.empty(shape.state_bytes // 4, np.float32)
    for transport, layers in layout.parts:
        columns = shape.columns_of(layers)
        own = np.empty(len(columns), np.float32)
        transport.fetch(STATE_KEY, own)
        state[columns] = own
    if not np.isfinite(state).all():
        raise StateError("the stream has a recurrent state with a number that isn't finite")
    return state


def receive_headers(layout: Layout) -> list[MessageHeader]:
    """Of each transport; they begin the same message."""
    headers = [MessageHeader.receive(transport) for transport, _ in layout.parts]
    if len({header._replace(n_bytes=0) for header in headers}) > 1:
        raise StateError("the transports carry different streams")
    return headers


def receive_whole(layout: Layout, shape: Shape, headers: Sequence[MessageHeader], n_ctx: int) -> SavedState:
    """What follows the headers of a message WHOLE."""
    saved, runs = receive_cells(layout, shape, headers, n_ctx)
    n_cells = [len(cells.pos) for cells in saved.groups]
    for lengths, n in zip(runs or (), n_cells, strict=False):
        check_runs(lengths, n)
    rows = receive_rows(layout, shape, n_cells, runs)
    groups = tuple(
        replace(cells, rows=own, packed=packed)
        for cells, (own, packed) in zip(saved.groups, rows, strict=True)
    )
    return replace(saved, groups=groups)


def receive_cells(
    layout: Layout, shape: Shape, headers: Sequence[MessageHeader], n_ctx: int, with_states: bool = True
) -> tuple[SavedState, Runs | None]:
    """The tables behind the headers: a sequence without rows, and the runs in which they come."""
    states: list[SavedState] = []
    runs: list[Runs | None] = []
    for (transport, layers), header in zip(layout.parts, headers, strict=True):
        table = memoryview(receive_table(transport, header, _most_bytes(shape, n_ctx)))
        own = None
        if header.in_runs:
            own, table = take_runs(table, len(shape.room))
        states.append(unpack(table, shape.of(layers, with_states), shape.room))
        runs.append(own)
    saved = _agreed(shape, layout, states, runs)
    for cells in saved.groups:
        if len(cells.pos) > 2 * n_ctx:  # those that are seen, and those that checkpoints hold
            raise CacheFullError(f"what comes has {len(cells.pos)} cells in a group; n_ctx is {n_ctx} here")
    return saved, runs[0]


def receive_table(transport: Transport, header: MessageHeader, most: int) -> bytearray:
    """Raises StateError for one that is larger than any can be."""
    if header.n_bytes > most:
        raise StateError(f"the stream's table has {header.n_bytes} bytes, more than this cache can take")
    table = bytearray(header.n_bytes)
    transport.fetch(TABLE_KEY, table)
    return table


def receive_rows(
    layout: Layout, shape: Shape, n_cells: Sequence[int], runs: Runs | None
) -> list[tuple[npt.NDArray[np.uint8], PackedGroup | None]]:
    """Rows of so many cells of each group, as SavedCells has them. Each transport has a thread."""
    packed: list[list[PackedRows | None]] = [[None] * len(group.layers) for group in shape.geometry.groups]
    groups = [
        np.empty(n * group.cell_bytes, np.uint8)
        for n, group in zip(n_cells, shape.geometry.groups, strict=True)
    ]

    def fetch(transport: Transport, layers: Sequence[int]) -> None:
        for layer in layers:
            if isinstance(transport, DeviceTransport) and runs is None and layer in shape.rows:
                k, v = shape.rows[layer]
                n_bytes = n_cells[k.group] * (k.n_bytes + v.n_bytes)
                packed[k.group][k.place] = transport.fetch_rows(packed_key(layer), n_bytes)
                continue
            for row in shape.rows.get(layer, ()):
                place = place_of(shape, row, n_cells[row.group])
                own = None if runs is None else runs[row.group]
                fetch_rows(transport, row, groups[row.group][place], own)

    each_transport(layout, fetch)
    return [
        (rows, PackedGroup(tuple(own), np.arange(n, dtype=np.int32)) if any(own) else None)
        for rows, own, n in zip(groups, packed, n_cells, strict=True)
    ]


def place_of(shape: Shape, row: RowFormat, n_cells: int) -> slice:
    """Where the rows of a layer's K or V are among those of its group."""
    k, v = shape.rows[row.layer]
    begin = n_cells * (row.place * (k.n_bytes + v.n_bytes) + (k.n_bytes if row is v else 0))
    return slice(begin, begin + n_cells * row.n_bytes)


def fetch_rows(
    transport: Transport, row: RowFormat, into: npt.NDArray[np.uint8], runs: list[int] | None
) -> None:
    """As layer_rows() sends them. runs None: one region. Raises StateError for what isn't finite."""
    if runs is None:
        transport.fetch(row.key, into)
    begin = 0
    for index, length in enumerate(runs or ()):
        end = begin + length * row.n_bytes
        transport.fetch(f"{row.key}:{index}", into[begin:end])
        begin = end
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


def _agreed(
    shape: Shape, layout: Layout, tables: Sequence[SavedState], runs: Sequence[Runs | None]
) -> SavedState:
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

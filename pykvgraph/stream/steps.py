"""Messages about the tokens that a sequence has got at its end, region by region."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph._native.kv import read_states
from pykvgraph._native.library import lib
from pykvgraph.errors import StateError
from pykvgraph.kv_cache.reserved_cells import read_rows_of
from pykvgraph.kv_cache.saved.device_rows import PackedRows
from pykvgraph.stream.header import HEADER_KEY, STATE_KEY, TABLE_KEY, MessageHeader, MessageKind
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.shape import Shape
from pykvgraph.stream.transports.device import DeviceTransport
from pykvgraph.stream.transports.transport import Transport


def runs_of(cells: npt.NDArray[np.int32]) -> list[int]:
    """How many cells each run has, in this order of cells."""
    begins = np.flatnonzero(np.diff(cells) != 1) + 1
    return np.diff([0, *begins.tolist(), len(cells)]).tolist() if len(cells) else []


def pack_runs(groups: Sequence[Sequence[int]]) -> bytes:
    """The lengths of the runs of each group, in front of a table."""
    return b"".join(np.array([len(runs), *runs], "<u4").tobytes() for runs in groups)


def take_runs(table: memoryview, n_groups: int) -> tuple[list[list[int]], memoryview]:
    """What pack_runs gave, and what follows it. Raises StateError."""
    groups: list[list[int]] = []
    for _ in range(n_groups):
        n = int.from_bytes(table[:4], "little")
        if n > len(table) // 4 - 1:
            raise StateError("the stream's table is too short for its runs")
        groups.append(np.frombuffer(table, "<u4", n, 4).tolist())
        table = table[4 + 4 * n :]
    return groups, table


def check_runs(runs: Sequence[int], n_cells: int) -> None:
    """Raises StateError unless these are the runs of so many cells."""
    if sum(runs) != n_cells or 0 in runs:
        raise StateError(f"the stream's table has runs of {sum(runs)} cells in all for {n_cells}")


Array = npt.NDArray[np.int32]
State = npt.NDArray[np.float32]


class Region(NamedTuple):
    """To be flushed over a transport."""

    transport: Transport
    key: str
    data: bytes | npt.NDArray[np.uint8] | State | PackedRows

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, np.ndarray) else len(self.data)


class NewCells(NamedTuple):
    """New cells of a group, by position."""

    cells: Array
    positions: Array


def new_cells(context: int, seq: int, group: int, first: int) -> NewCells:
    """Those of a sequence from a position on."""
    there = ctypes.c_int64()
    lib().kvg_kv_seq_cells(context, seq, group, first, None, None, 0, ctypes.byref(there))
    found = NewCells(np.empty(there.value, np.int32), np.empty(there.value, np.int32))
    pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)) for array in found]
    lib().kvg_kv_seq_cells(context, seq, group, first, *pointers, there.value, ctypes.byref(there))
    return found


def read_state(context: int, shape: Shape, seq: int) -> State | None:
    """Of the sequence's end; None: nobody knows it, or no layer has one."""
    if not shape.state_bytes:
        return None
    rows = np.flatnonzero(read_states(context).seq[:, seq])
    if not len(rows):
        return None
    state = np.empty(shape.state_bytes // 4, np.float32)
    lib().kvg_kv_read_state(context, int(rows[0]), state.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
    return state


def step_headers(
    layout: Layout, first: int, positions: Sequence[Array], runs: Sequence[list[int]] | None, with_state: bool
) -> Iterator[Region]:
    """What a message STEP begins with. positions: of each group. runs None: rows come in one region."""
    table = b"".join(
        np.array([len(each)], "<u4").tobytes() + each.astype("<i4").tobytes() for each in positions
    )
    table = (pack_runs(runs) if runs is not None else b"") + table
    header = MessageHeader(MessageKind.STEP, runs is not None, with_state, first, len(table)).pack()
    for transport, _ in layout.parts:
        yield Region(transport, HEADER_KEY, header)
        yield Region(transport, TABLE_KEY, table)


def read_step_table(
    table: memoryview, header: MessageHeader, n_groups: int
) -> tuple[list[Array], list[list[int]] | None]:
    """Positions of each group, and runs. Raises StateError."""
    runs: list[list[int]] | None = None
    if header.in_runs:
        runs, table = take_runs(table, n_groups)
    positions = []
    for index in range(n_groups):
        n = int.from_bytes(table[:4], "little")
        if len(table) < 4 or n > len(table) // 4 - 1:
            raise StateError("the stream's table is too short for its positions")
        positions.append(np.frombuffer(table, "<i4", n, 4).astype(np.int32))
        if n and positions[-1].min() < header.first:
            raise StateError(
                f"the stream's table has positions before {header.first}, where its tokens begin"
            )
        if (np.diff(positions[-1]) <= 0).any():
            raise StateError("the stream's table has positions that don't rise")
        if runs is not None:
            check_runs(runs[index], n)
        table = table[4 + 4 * n :]
    if len(table):
        raise StateError("the stream's table holds more than its positions")
    return positions, runs


def step(
    context: int, shape: Shape, layout: Layout, seq: int, first: int, in_runs: bool, state: State | None
) -> Iterator[Region]:
    """All that a sequence has from a position on, as a message STEP: K and V of each layer."""
    groups = [new_cells(context, seq, index, first) for index in range(len(shape.room))]
    runs = [runs_of(each.cells) for each in groups] if in_runs else None
    yield from step_headers(layout, first, [each.positions for each in groups], runs, state is not None)
    yield from layer_rows(context, shape, layout, [each.cells for each in groups], runs)
    yield from state_regions(shape, layout, state)


def layer_rows(
    context: int,
    shape: Shape,
    layout: Layout,
    cells: Sequence[Array],
    runs: Sequence[list[int]] | None,
    packed: bool = False,
) -> Iterator[Region]:
    """K and V of these cells of each group, layer by layer, each over its transport.

    packed: what goes over a DeviceTransport goes as packed rows.
    """
    over = {layer: transport for transport, layers in layout.parts for layer in layers}
    for layer in sorted(over.keys() & shape.rows.keys()):
        k, v = shape.rows[layer]
        if packed and isinstance(over[layer], DeviceTransport):
            own = PackedRows(context, k.group, k.place, cells[k.group], k.n_bytes + v.n_bytes)
            yield Region(over[layer], packed_key(layer), own)
            continue
        of = range(k.place, k.place + 1)
        rows = read_rows_of(context, k.group, of, cells[k.group], k.n_bytes + v.n_bytes).data
        yield from split_rows(over[layer], shape, layer, rows, None if runs is None else runs[k.group])


def packed_key(layer: int) -> str:
    """Of a region with packed rows of a layer."""
    return f"{layer}:kv"


def split_rows(
    transport: Transport, shape: Shape, layer: int, rows: npt.NDArray[np.uint8], runs: list[int] | None
) -> Iterator[Region]:
    """K of each cell and then V of each, as regions. runs None: one of each."""
    k, v = shape.rows[layer]
    n = len(rows) // max(k.n_bytes + v.n_bytes, 1)
    middle = n * k.n_bytes
    for row, data in ((k, rows[:middle]), (v, rows[middle:])):
        begin = 0
        for index, length in enumerate([n] if runs is None else runs):
            ending = "" if runs is None else f":{index}"
            end = begin + length * row.n_bytes
            yield Region(transport, row.key + ending, data[begin:end])
            begin = end


def token(
    context: int, shape: Shape, layout: Layout, seq: int, pos: int, state: State | None
) -> Iterator[Region]:
    """The last token of a sequence: K of all layers is a region, and V."""
    header = MessageHeader(MessageKind.TOKEN, with_state=state is not None, first=pos).pack()
    rows = []
    for index, group in enumerate(shape.geometry.groups):
        cells = new_cells(context, seq, index, pos).cells
        row_bytes = group.cell_bytes // max(group.n_layer, 1)
        data = read_rows_of(context, index, range(group.n_layer), cells, row_bytes).data
        rows.append(data.reshape(group.n_layer, row_bytes))
    for transport, layers in layout.parts:
        k, v = [], []
        for places, (k_row, _), group_rows in shape.places(layers, rows):
            own = group_rows if len(places) == len(group_rows) else group_rows[places]
            k.append(own[:, : k_row.n_bytes].ravel())
            v.append(own[:, k_row.n_bytes :].ravel())
        yield Region(transport, HEADER_KEY, header)
        yield Region(transport, "k", _joined(k))
        yield Region(transport, "v", _joined(v))
    yield from state_regions(shape, layout, state)


def _joined(parts: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """One after the other; most models have one group of cells, so there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])


def state_regions(shape: Shape, layout: Layout, state: State | None) -> Iterator[Region]:
    """Of the layers of each transport."""
    if state is not None:
        for transport, layers in layout.parts:
            yield Region(transport, STATE_KEY, state[shape.columns_of(layers)])


def text(layout: Layout, first: int, said: Sequence[int]) -> Iterator[Region]:
    """A message TEXT: tokens, of which the first one is the text's token `first`."""
    table = np.array(said, "<i4").tobytes()
    for transport, _ in layout.parts:
        yield Region(
            transport, HEADER_KEY, MessageHeader(MessageKind.TEXT, first=first, n_bytes=len(table)).pack()
        )
        yield Region(transport, TABLE_KEY, table)


def end(layout: Layout) -> Iterator[Region]:
    """Nothing follows."""
    for transport, _ in layout.parts:
        yield Region(transport, HEADER_KEY, MessageHeader(MessageKind.END).pack())

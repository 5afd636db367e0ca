"""Saved cells as bytes: what the sections of docs/state-format.md hold, written and checked.

Knows nothing of contexts. A blob from outside is hostile until `unpack` has returned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgGroupKind
from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved import v1
from pykvgraph.kv_cache.saved.cells import (
    Counts,
    SavedCells,
    SavedCheckpoint,
    SavedState,
    are_alike,
    check_room,
    read_lost,
    read_table,
    write_table,
)
from pykvgraph.kv_cache.saved.checkpoints import joined, pack_checkpoints, read_checkpoints
from pykvgraph.kv_cache.saved.geometry import Geometry, GroupGeometry, check_geometry
from pykvgraph.kv_cache.saved.rows import GroupRows, check_rows
from pykvgraph.kv_cache.saved.sections import (
    CELL,
    CKPT,
    KEPT,
    KROW,
    LOST,
    MAGIC,
    MODL,
    PEND,
    ROWS,
    STAT,
    VERSION,
    Reader,
    Section,
    Writer,
)
from pykvgraph.kv_cache.saved.source import BytesSource, Source
from pykvgraph.kv_cache.saved.states import read_states, section_bytes, write_states

_FRONT = struct.Struct("<8sI")  # magic and version, the same in every format
_MODEL = struct.Struct("<16sII")  # fingerprint, number of groups, 0
# kind, n_layer, window, n_head_kv, head_dim_k, head_dim_v, type_k, type_v, 0, cell bytes; then the layers
_GROUP = struct.Struct("<IIQIIIIIIQ")
_COUNTS = struct.Struct("<IIQ")  # whole?, n_seq, n_cells; then the table
_PENDING = struct.Struct("<Ii")  # of each: its sequence, the token
_MAX_MODEL_BYTES = _MAX_CHECKPOINT_BYTES = 1 << 20


@dataclass(frozen=True)
class Table:
    """A group's cells without K and V: pos, seq and lost as in SavedCells.

    kept: positions, and whose checkpoints hold them, of cells that these sequences don't see.
    """

    pos: npt.NDArray[np.int32]
    seq: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.int32]
    kept: tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]


# Writes rows and dithers of a group into the arrays that it is given; True: those of the cells that are kept
Fill = Callable[[int, bool, npt.NDArray[np.uint8], npt.NDArray[np.uint8]], None]


@dataclass(frozen=True)
class StateTable:
    """Recurrent states without their rows: owners as in SavedRows. fill: writes them, (n_rows, floats)."""

    owners: npt.NDArray[np.int32]
    n_rows: int
    fill: Callable[[npt.NDArray[np.float32]], None]


def pack(
    geometry: Geometry,
    whole: bool,
    tables: Sequence[Table],
    fill: Fill,
    checkpoints: Sequence[SavedCheckpoint] = (),
    states: StateTable | None = None,
    pending: Sequence[tuple[int, int]] = (),
) -> bytes:
    """A blob that `unpack` gives the same cells for, of each group."""
    windows = _windows(geometry)
    model, marks = _pack_model(geometry), pack_checkpoints(checkpoints, windows)
    groups = range(len(tables))
    kept = windows if checkpoints else []
    counts = [Counts(whole, table.seq.shape[1], len(table.pos)) for table in tables]
    n_kept = [Counts(whole, table.seq.shape[1], len(table.kept[0])) for table in tables]
    sizes = [group.cell_bytes for group in geometry.groups]
    with_states = states is not None and geometry.state_bytes > 0
    n_state_bytes = (
        section_bytes(len(states.owners), states.n_rows, geometry.state_bytes)
        if states and with_states
        else 0
    )
    writer = Writer(
        [
            (MODL, 0, len(model)),
            *((CELL, index, _COUNTS.size + counts[index].table_bytes) for index in groups),
            *((LOST, index, 4 * counts[index].n_seq) for index in windows),
            *((ROWS, index, counts[index].n_cells * sizes[index]) for index in groups),
            *((STAT, 0, n_state_bytes) for _ in range(int(with_states))),
            *((CKPT, 0, len(marks)) for _ in checkpoints[:1]),
            *((KEPT, index, _COUNTS.size + n_kept[index].table_bytes) for index in kept),
            *((KROW, index, n_kept[index].n_cells * sizes[index]) for index in kept),
            *((PEND, 0, len(pending) * _PENDING.size) for _ in pending[:1]),
        ]
    )

    def write_cells(
        tag: bytes, rows: bytes, index: int, pos: npt.NDArray[np.int32], seq: npt.NDArray[np.bool_]
    ) -> None:
        count = n_kept[index] if tag == KEPT else counts[index]
        dither = np.empty(count.n_cells, np.uint8)
        fill(index, tag == KEPT, writer.place(rows, index), dither)
        front = _COUNTS.pack(count.whole, count.n_seq, count.n_cells)
        writer.write(tag, index, front + write_table(pos, seq, dither))

    writer.write(MODL, 0, model)
    for index in windows:
        writer.write(LOST, index, tables[index].lost.astype("<i4").tobytes())
    for index, table in enumerate(tables):
        write_cells(CELL, ROWS, index, table.pos, table.seq)
    if checkpoints:
        writer.write(CKPT, 0, marks)
    if states and with_states:
        states.fill(write_states(writer.place(STAT, 0), states.owners, states.n_rows, geometry.state_bytes))
    for index in kept:
        write_cells(KEPT, KROW, index, *tables[index].kept)
    if pending:
        writer.write(PEND, 0, b"".join(_PENDING.pack(*each) for each in pending))
    return writer.finish()


def _windows(geometry: Geometry) -> list[int]:
    """The groups that have a window."""
    return [i for i, group in enumerate(geometry.groups) if group.kind == KvgGroupKind.KVG_GROUP_WINDOW]


def _pack_model(geometry: Geometry) -> bytes:
    parts = [_MODEL.pack(geometry.model, len(geometry.groups), 0)]
    for group in geometry.groups:
        shape = (group.n_head_kv, group.head_dim_k, group.head_dim_v, group.type_k, group.type_v)
        parts.append(_GROUP.pack(group.kind, group.n_layer, group.window, *shape, 0, group.cell_bytes))
        parts.append(struct.pack(f"<{group.n_layer}I", *group.layers))
    return b"".join(parts)


def unpack(data: bytes | memoryview, geometry: Geometry, room: Sequence[int] | None = None) -> SavedState:
    """The cells in a blob of either format.

    Raises StateError for one that is damaged, or that doesn't fit this geometry; CacheFullError where it has
    more cells than `room` tells of for each group, None: any number will do.
    """
    return read_state(BytesSource(data), geometry, room)


def read_state(source: Source, geometry: Geometry, room: Sequence[int] | None) -> SavedState:
    """As `unpack`. K and V are asked for last, when all else is right and fits."""
    front = bytes(source.read(0, min(_FRONT.size, source.size)))
    if len(front) < _FRONT.size or not front.startswith(MAGIC):
        raise StateError(f"these {source.size} bytes are no saved state: expected {MAGIC!r} in front")
    _, version = _FRONT.unpack(front)
    if version == v1.VERSION:
        return v1.read(source, geometry, room)
    if version != VERSION:
        raise StateError(
            f"the saved state has format version {version}; this pykvgraph reads versions {v1.VERSION} and "
            f"{VERSION}"
        )
    return _read_sections(Reader(source), geometry, room)


def _read_sections(reader: Reader, here: Geometry, room: Sequence[int] | None) -> SavedState:
    model = reader.section(MODL)
    if model.n_bytes > _MAX_MODEL_BYTES:
        raise StateError(f"the saved state's {model.name} has {model.n_bytes} bytes, far too many")
    check_geometry(_read_model(reader.checked(model)), here)
    n_groups = len(here.groups)
    reader.require_no_more_than(n_groups, _windows(here), here.state_bytes > 0)
    counts = [_read_counts(reader, CELL, index) for index in range(n_groups)]
    for count, group, index in zip(counts, here.groups, range(n_groups), strict=True):
        _check_size(reader.section(ROWS, index), count, group)
        if (count.whole, count.n_seq) != (counts[0].whole, counts[0].n_seq):
            raise StateError("the saved state's groups don't agree on what is saved: a cache, or a sequence")
    full = [0 if group.kind == KvgGroupKind.KVG_GROUP_WINDOW else 1 for group in here.groups]
    # what a window has too much of is left out later (fitted)
    check_room([count.n_cells * is_full for count, is_full in zip(counts, full, strict=True)], room)
    tables = [reader.checked(reader.section(CELL, index))[_COUNTS.size :] for index in range(n_groups)]
    return _read_cells(reader, here, counts, tables)


def _read_cells(
    reader: Reader, here: Geometry, counts: Sequence[Counts], tables: Sequence[memoryview]
) -> SavedState:
    no_rows = np.empty(0, np.uint8)
    cells = [read_table(table, count, no_rows) for table, count in zip(tables, counts, strict=True)]
    for index in _windows(here):
        lost = read_lost(reader.checked(reader.section(LOST, index)), cells[index])
        cells[index] = replace(cells[index], lost=lost)
    _check_agreement(cells, here)
    rows = []
    for index, (count, group) in enumerate(zip(counts, here.groups, strict=True)):
        section = reader.section(ROWS, index)
        rows.append(GroupRows(group, reader.contents(section), section.checksum, count.n_cells))
    check_rows(rows)
    groups = tuple(
        replace(of, rows=np.frombuffer(part.data, np.uint8)) for of, part in zip(cells, rows, strict=True)
    )
    state = _with_checkpoints(reader, here, counts[0], SavedState(bool(counts[0].whole), groups))
    state = replace(state, pending=_read_pending(reader, counts[0].n_seq))
    return _with_states(reader, here, counts[0].n_seq, state)


def _read_pending(reader: Reader, n_seq: int) -> tuple[tuple[int, int], ...]:
    if not reader.has(PEND):
        return ()
    section = reader.section(PEND)
    if section.n_bytes % _PENDING.size or section.n_bytes > n_seq * _PENDING.size:
        raise StateError(
            f"the saved state's {section.name} has {section.n_bytes} bytes for {n_seq} sequences"
        )
    found = dict(_PENDING.iter_unpack(reader.checked(section)))
    if len(found) * _PENDING.size != section.n_bytes or any(
        seq >= n_seq or token < 0 for seq, token in found.items()
    ):
        raise StateError("the saved state has a pending token that can't be")
    return tuple(found.items())


def _with_states(reader: Reader, here: Geometry, n_seq: int, state: SavedState) -> SavedState:
    if here.state_bytes == 0:
        return state
    section = reader.section(STAT)
    most = n_seq + len(state.checkpoints)
    if section.n_bytes > section_bytes(most, most, here.state_bytes):
        raise StateError(
            f"the saved state's {section.name} has {section.n_bytes} bytes, more than the recurrent "
            f"states of {n_seq} sequences and {len(state.checkpoints)} checkpoints"
        )
    with_cells = np.any([cells.seq.any(axis=0) for cells in state.groups], axis=0)
    states = read_states(reader.checked(section), here.state_bytes, with_cells, state.checkpoints)
    return replace(state, states=states)


def _with_checkpoints(reader: Reader, here: Geometry, like: Counts, state: SavedState) -> SavedState:
    """The state with what its optional sections hold, if they are there."""
    windows = _windows(here)
    found = [(tag, index) for tag in (KEPT, KROW) for index in windows if reader.has(tag, index)]
    if not reader.has(CKPT):
        if found:
            raise StateError("the saved state has cells of checkpoints, and no checkpoints")
        return state
    marks = reader.section(CKPT)
    if marks.n_bytes > _MAX_CHECKPOINT_BYTES:
        raise StateError(f"the saved state's {marks.name} has {marks.n_bytes} bytes, far too many")
    checkpoints = read_checkpoints(reader.checked(marks), windows, len(here.groups), like.n_seq)
    groups = list(state.groups)
    for index in windows:
        count, rows = _read_counts(reader, KEPT, index), reader.section(KROW, index)
        _check_size(rows, count, here.groups[index])
        if (count.whole, count.n_seq) != (like.whole, like.n_seq):
            raise StateError("the saved state's checkpoints are of other sequences")
        data = reader.contents(rows)
        check_rows([GroupRows(here.groups[index], data, rows.checksum, count.n_cells)])
        table = reader.checked(reader.section(KEPT, index))[_COUNTS.size :]
        kept = read_table(table, count, np.frombuffer(data, np.uint8))
        groups[index] = joined(here.groups[index], groups[index], kept)
    return replace(state, groups=tuple(groups), checkpoints=checkpoints)


def _check_size(rows: Section, count: Counts, group: GroupGeometry) -> None:
    if rows.n_bytes != count.n_cells * group.cell_bytes:
        raise StateError(
            f"the saved state's {rows.name} has {rows.n_bytes} bytes, and {count.n_cells} cells have "
            f"{count.n_cells * group.cell_bytes}"
        )


def _read_model(data: memoryview) -> Geometry:
    """Raises StateError for lengths that don't add up; whether it fits is another question."""
    groups = []
    try:
        model, n_groups, zeros = _MODEL.unpack_from(data)
        offset = _MODEL.size
        for _ in range(n_groups):
            kind, n_layer, window, n_head_kv, *dims, zero, cell_bytes = _GROUP.unpack_from(data, offset)
            dim_k, dim_v, type_k, type_v = dims
            offset += _GROUP.size
            if n_layer > (len(data) - offset) // 4:
                raise StateError(f"the saved state's section MODL 0 is too short for {n_layer} layers")
            layers = struct.unpack_from(f"<{n_layer}I", data, offset)
            offset += 4 * n_layer
            zeros |= zero
            groups.append(
                GroupGeometry(kind, window, layers, n_head_kv, dim_k, dim_v, type_k, type_v, cell_bytes)
            )
    except struct.error:
        raise StateError("the saved state's section MODL 0 is too short for its groups") from None
    if offset != len(data) or zeros != 0:
        raise StateError("the saved state's section MODL 0 holds more than its groups")
    return Geometry(model, tuple(groups))


def _read_counts(reader: Reader, tag: bytes, index: int) -> Counts:
    """Of a group; they agree with the section's size, so that no more is read than there can be."""
    section = reader.section(tag, index)
    counts = Counts(*_COUNTS.unpack(reader.front(section, _COUNTS.size)))
    if section.n_bytes != _COUNTS.size + counts.table_bytes:
        raise StateError(
            f"the saved state's {section.name} has {section.n_bytes} bytes and tells of {counts.n_cells} "
            f"cells of {counts.n_seq} sequences: it is damaged; save it again"
        )
    counts.check()
    return counts


def _check_agreement(cells: Sequence[SavedCells], here: Geometry) -> None:
    """Groups that keep every position keep the same ones, for the same sequences."""
    full = [i for i, group in enumerate(here.groups) if group.kind == KvgGroupKind.KVG_GROUP_FULL]
    for index in full[1:]:
        if not are_alike(cells[full[0]], cells[index]):
            raise StateError(
                f"the saved state's groups {full[0]} and {index} have cells at other positions, or of other "
                "sequences: somebody forged it"
            )

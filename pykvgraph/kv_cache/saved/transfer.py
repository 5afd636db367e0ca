"""Cells out of a native cache, and back in. All take a context's pointer, within one Handle.call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import (
    KvgKvCheckpointList,
    KvgKvInfo,
    KvgKvReadRequest,
    KvgKvRows,
    KvgKvStateList,
)
from pykvgraph._native.kv import (
    int32,
    read_cells,
    read_checkpoints,
    read_group,
    read_info,
    read_layers,
    read_lost,
    read_states,
    uint8,
)
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import integer
from pykvgraph.errors import CacheFullError, StateError
from pykvgraph.kv_cache.saved.cells import SavedCells, SavedCheckpoint, SavedRows, SavedState
from pykvgraph.kv_cache.saved.checkpoints import fitted
from pykvgraph.kv_cache.saved.format import StateTable, Table, pack
from pykvgraph.kv_cache.saved.geometry import HADAMARD, LONG_ROPE, Geometry, GroupGeometry
from pykvgraph.model.gguf_file import fingerprint

# The pending tokens of a sequence, or with None of all: PendingTokens.saved
PendingOf = Callable[[int | None], Sequence[tuple[int, int]]]


def read_geometry(context: int) -> Geometry:
    """What a saved row must fit."""
    info = read_info(context)
    groups = tuple(_group_geometry(context, info, index) for index in range(info.n_groups))
    return Geometry(fingerprint(lib().kvg_context_gguf(context)), groups, info.state_bytes)


def _group_geometry(context: int, info: KvgKvInfo, index: int) -> GroupGeometry:
    group = read_group(context, index)
    return GroupGeometry(
        group.kind,
        group.window,
        read_layers(context, index),
        group.n_head_kv,
        group.head_dim_k,
        group.head_dim_v,
        info.type_k + HADAMARD * group.hadamard_k + LONG_ROPE * group.long_rope,
        info.type_v + HADAMARD * group.hadamard_v,
        group.n_layer * (group.k_row_bytes + group.v_row_bytes),
    )


@dataclass(frozen=True)
class Chosen:
    """What is saved of a cache, without rows; `cells` and `states` say where these are.

    cells: of each group, cells that a sequence sees, and others that only checkpoints hold. states: rows of
    recurrent states, which `owners` (SavedRows) counts from 0.
    """

    whole: bool
    tables: list[Table]
    cells: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]
    checkpoints: list[SavedCheckpoint]
    owners: npt.NDArray[np.int32]
    states: list[int]
    pending: list[tuple[int, int]]


def choose(context: int, seq: int | None, pending: PendingOf) -> Chosen:
    """All that belongs to a sequence, or with None the whole cache."""
    info = read_info(context)
    ids = range(info.n_seq_max) if seq is None else [integer(seq, "seq", 0, info.n_seq_max - 1)]
    points = {s: read_checkpoints(context, s) for s in ids}
    lost_of: dict[int, list[tuple[int, ...]]] = {s: [] for s in ids}  # a tuple for each group
    chosen, tables = [], []
    for index in range(info.n_groups):
        view = read_cells(context, index)
        seen = view.seq[:, ids]
        kept = np.zeros_like(seen)
        for place, s in enumerate(ids):
            if points[s]:
                lost, kept[:, place] = _checkpoint_cells(context, s, index, len(points[s]), len(view.pos))
                lost_of[s].append(lost)
        kept &= ~seen
        cells, more = _in_order(view.pos, seen), _in_order(view.pos, kept)
        chosen.append((cells, more))
        held = view.pos[more], kept[more]
        tables.append(
            Table(view.pos[cells], seen[cells], read_lost(context, index, info.n_seq_max)[ids], held)
        )
    checkpoints = [
        SavedCheckpoint(place, p, tuple(lost[i] for lost in lost_of[s]))
        for place, s in enumerate(ids)
        for i, p in enumerate(points[s])
    ]
    owners, states = (
        _state_owners(context, ids, points) if info.n_states else (np.empty((0, 3), np.int32), [])
    )
    return Chosen(seq is None, tables, chosen, checkpoints, owners, states, list(pending(seq)))


def take(context: int, geometry: Geometry, seq: int | None, pending: PendingOf) -> bytes:
    """The cells of a sequence, or with None of all of them, as a saved state; K at its positions."""
    chosen = choose(context, seq, pending)

    def fill(index: int, kept: bool, rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        n_layer = geometry.groups[index].n_layer
        _read_rows(context, index, n_layer, chosen.cells[index][kept], rows, dither)

    read = functools.partial(_read_states, context, chosen.states)
    table = StateTable(chosen.owners, len(chosen.states), read)
    return pack(geometry, chosen.whole, chosen.tables, fill, chosen.checkpoints, table, chosen.pending)


def take_table(context: int, geometry: Geometry, chosen: Chosen, columns: npt.NDArray[np.intp]) -> bytes:
    """What take() gives, without K and V, and of recurrent states these columns.

    geometry: with cell_bytes 0, and the state_bytes of the columns.
    """

    def fill(index: int, kept: bool, rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        _read_rows(context, index, 0, chosen.cells[index][kept], rows, dither)

    def fill_states(rows: npt.NDArray[np.float32]) -> None:
        whole = np.empty((len(rows), read_info(context).state_bytes // 4), np.float32)
        _read_states(context, chosen.states, whole)
        rows[:] = whole[:, columns]

    table = StateTable(chosen.owners, len(chosen.states), fill_states)
    return pack(geometry, chosen.whole, chosen.tables, fill, chosen.checkpoints, table, chosen.pending)


def take_part_table(
    context: int,
    geometry: Geometry,
    cells: Sequence[npt.NDArray[np.int32]],
    positions: Sequence[npt.NDArray[np.int32]],
) -> bytes:
    """What take() gives for a sequence that has these cells of each group alone, without K and V.

    geometry: with cell_bytes 0, and no state.
    """
    none = np.empty(0, np.int32), np.empty((0, 1), np.bool_)
    tables = []
    for group, pos in zip(geometry.groups, positions, strict=True):
        lost = int(pos[0]) - 1 if group.window and len(pos) else -1
        tables.append(Table(pos, np.ones((len(pos), 1), np.bool_), np.array([lost], np.int32), none))

    def fill(index: int, kept: bool, rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        _read_rows(context, index, 0, cells[index], rows, dither)

    return pack(geometry, False, tables, fill)


def take_held(context: int, geometry: Geometry, hold: int, span: range, point: int | None) -> bytes:
    """What a hold and a resume point keep, as the saved state of a sequence that has nothing else.

    hold: the number of a hold that begins with these positions. point: that of a resume point behind them;
    None: there is none, and no states and no cells of windows are saved.
    """
    chosen, tables = [], []
    for index in range(len(geometry.groups)):
        cells, begin, lost = _held_cells(context, hold, index)[: len(span)], span.start, -1
        if point is not None and len(behind := _held_cells(context, point, index)):
            cells, begin = behind, span.stop - len(behind)
            lost = begin - 1
        pos = np.arange(begin, begin + len(cells), dtype=np.int32)
        none = np.empty(0, np.int32), np.empty((0, 1), np.bool_)
        chosen.append(cells)
        tables.append(Table(pos, np.ones((len(pos), 1), np.bool_), np.array([lost], np.int32), none))

    def fill(index: int, kept: bool, rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        _read_rows(context, index, geometry.groups[index].n_layer, chosen[index], rows, dither)

    state = None
    if point is not None and geometry.state_bytes:
        row = ctypes.c_int64()
        lib().kvg_kv_held_state(context, point, ctypes.byref(row))
        read = functools.partial(_read_states, context, [row.value])
        state = StateTable(np.array([[0, -1, 0]], np.int32), 1, read)
    return pack(geometry, False, tables, fill, states=state)


def _held_cells(context: int, hold: int, group: int) -> npt.NDArray[np.int32]:
    """By position."""
    there = ctypes.c_int64()
    lib().kvg_kv_held_cells(context, hold, group, None, 0, ctypes.byref(there))
    cells = np.empty(there.value, np.int32)
    lib().kvg_kv_held_cells(context, hold, group, int32(cells), len(cells), ctypes.byref(there))
    return cells


def _read_rows(
    context: int,
    group: int,
    n_layer: int,
    cells: npt.NDArray[np.int32],
    rows: npt.NDArray[np.uint8],
    dither: npt.NDArray[np.uint8],
) -> None:
    """Of the first layers of a group, into arrays that are there."""
    request = sized(
        KvgKvReadRequest,
        group=group,
        layer_begin=0,
        layer_end=n_layer,
        cells=int32(cells),
        n_cells=len(cells),
        data=uint8(rows),
        n_bytes=rows.size,
        dither=uint8(dither),
    )
    lib().kvg_kv_read_rows(context, ctypes.byref(request))


def _read_states(context: int, states: Sequence[int], rows: npt.NDArray[np.float32]) -> None:
    for state, row in zip(states, rows, strict=True):
        lib().kvg_kv_read_state(context, state, row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))


def _state_owners(
    context: int, ids: Sequence[int], points: Mapping[int, list[int]]
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Who has which state, as SavedRows.owners, and what their rows are here."""
    live = read_states(context).seq
    found: list[tuple[int, int, int]] = []
    for place, s in enumerate(ids):
        found += [(place, -1, int(row)) for row in np.flatnonzero(live[:, s])]
        if points[s]:
            rows = (ctypes.c_int32 * len(points[s]))()
            lib().kvg_kv_checkpoint_states(context, s, rows)
            found += [(place, p, row) for p, row in zip(points[s], rows, strict=True)]
    used, index = np.unique([row for *_, row in found], return_inverse=True)
    owners = [(*who, i) for (*who, _), i in zip(found, index, strict=True)]
    return np.array(owners, np.int32).reshape(-1, 3), used.tolist()


def _in_order(pos: npt.NDArray[np.int32], flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Cells that have any flag, by position."""
    cells = np.flatnonzero(flags.any(axis=1))
    return cells[np.argsort(pos[cells], kind="stable")].astype(np.int32)


def _checkpoint_cells(
    context: int, seq: int, group: int, n: int, n_cells: int
) -> tuple[tuple[int, ...], npt.NDArray[np.bool_]]:
    """Of each checkpoint what it has lost; of each cell, whether one of them holds it."""
    lost, kept = np.empty(n, np.int32), np.empty(n_cells, np.uint8)
    lib().kvg_kv_checkpoint_cells(context, seq, group, int32(lost), uint8(kept))
    return tuple(lost.tolist()), kept.astype(np.bool_)


def put(context: int, geometry: Geometry, saved: SavedState, seq: int | None) -> None:
    """Replaces a sequence, or with None the whole cache, in every group; all or nothing.

    Where windows have too little room, first the lowest checkpoints are left out.
    """
    n_seq_max = read_info(context).n_seq_max
    if seq is not None:
        integer(seq, "seq", 0, n_seq_max - 1)
    room = (ctypes.c_int64 * len(saved.groups))()
    lib().kvg_kv_room(context, -1 if seq is None else seq, room)
    for n in range(len(saved.checkpoints), -1, -1):
        try:
            return _replace(context, fitted(saved, geometry, list(room), n), seq, n_seq_max)
        except CacheFullError:
            if n == 0:
                raise


def _replace(context: int, saved: SavedState, seq: int | None, n_seq_max: int) -> None:
    seen = [_seen(cells.seq, n_seq_max, seq) for cells in saved.groups]
    kept = [_seen(cells.kept, n_seq_max, seq) for cells in saved.groups]
    lost = [_lost(cells, n_seq_max, seq) for cells in saved.groups]
    rows = (KvgKvRows * len(saved.groups))()
    pointers = []  # like all arrays that the structs point to, these must live until the call is over
    for index, cells in enumerate(saved.groups):
        rows[index] = sized(
            KvgKvRows,
            n_cells=len(cells.pos),
            pos=int32(cells.pos),
            seq=uint8(seen[index]),
            kept=uint8(kept[index]),
            dither=uint8(cells.dither),
            lost=int32(lost[index]),
            data=uint8(cells.rows),
            n_bytes=cells.rows.size,
        )
        if cells.packed is not None:
            pointers.append(cells.packed.pointers())
            rows[index].packed = pointers[-1]
            rows[index].which = int32(cells.packed.which)
    marks = saved.checkpoints
    seqs, positions, behind = (
        np.array([mark.seq if seq is None else seq for mark in marks], np.int32),
        np.array([mark.p for mark in marks], np.int32),
        np.array([mark.lost for mark in marks], np.int32),
    )
    checkpoints = sized(
        KvgKvCheckpointList, n=len(marks), seq=int32(seqs), p=int32(positions), lost=int32(behind)
    )
    states, _arrays = _state_list(saved.states, seq) if saved.states else (None, ())
    lib().kvg_kv_replace(
        context,
        -1 if seq is None else seq,
        rows,
        len(rows),
        ctypes.byref(checkpoints),
        ctypes.byref(states) if states else None,
    )


def _state_list(states: SavedRows, seq: int | None) -> tuple[KvgKvStateList, tuple[npt.NDArray[Any], ...]]:
    """The struct, and the arrays that it points to, which must live as long."""
    columns = states.owners.T.copy()
    if seq is not None:
        columns[0] = seq
    rows = np.ascontiguousarray(states.rows)
    struct = sized(
        KvgKvStateList,
        n=columns.shape[1],
        seq=int32(columns[0]),
        p=int32(columns[1]),
        row=int32(columns[2]),
        n_rows=len(rows),
        data=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
    )
    return struct, (columns, rows)


def _seen(flags: npt.NDArray[np.bool_], n_seq_max: int, seq: int | None) -> npt.NDArray[np.uint8]:
    """(n_cells, n_seq_max) of 0 and 1: whose the cells are here."""
    seen = np.zeros((len(flags), n_seq_max), np.uint8)
    if seq is not None:
        seen[:, seq] = flags[:, 0]
        return seen
    ids = np.flatnonzero(flags.any(axis=0))
    if len(ids) and ids[-1] >= n_seq_max:
        raise StateError(
            f"the state has sequence {ids[-1]}, and this cache has {n_seq_max} (n_seq_max): open the context "
            "with more"
        )
    seen[:, ids] = flags[:, ids]
    return seen


def _lost(cells: SavedCells, n_seq_max: int, seq: int | None) -> npt.NDArray[np.int32]:
    """(n_seq_max,): what sequences have lost here."""
    lost = np.full(n_seq_max, -1, np.int32)
    if seq is not None:
        lost[seq] = cells.lost[0]
    else:
        ids = range(min(n_seq_max, len(cells.lost)))
        lost[ids] = cells.lost[ids]
    return lost

"""Cells out of a native cache, and back in. All take a context's pointer, within one Handle.call."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgGroupInfo, KvgKvInfo, KvgKvReadRequest, KvgKvRows
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import integer
from pykvgraph.errors import StateError
from pykvgraph.gguf_file import fingerprint
from pykvgraph.state.cells import SavedCells, SavedState
from pykvgraph.state.format import pack
from pykvgraph.state.geometry import HADAMARD, LONG_ROPE, Geometry, GroupGeometry
from pykvgraph.types import CellsView


def read_info(context: int) -> KvgKvInfo:
    """What all groups of the cache have in common."""
    info = sized(KvgKvInfo)
    lib().kvg_kv_get_info(context, ctypes.byref(info))
    return info


def read_group(context: int, group: int) -> KvgGroupInfo:
    """Sizes and counts of one group."""
    info = sized(KvgGroupInfo)
    lib().kvg_kv_get_group(context, group, ctypes.byref(info))
    return info


def read_layers(context: int, group: int) -> tuple[int, ...]:
    """The layers of one group."""
    layers = np.empty(read_group(context, group).n_layer, np.int32)
    lib().kvg_kv_group_layers(context, group, _int32(layers))
    return tuple(layers.tolist())


def read_cells(context: int, group: int) -> CellsView:
    """A snapshot of every cell of one group."""
    n_cells, n_seq_max = read_group(context, group).n_cells, read_info(context).n_seq_max
    pos = np.empty(n_cells, np.int32)
    words = np.empty((n_cells, (n_seq_max + 63) // 64), np.uint64)
    shift = np.empty(n_cells, np.int32)
    dither = np.empty(n_cells, np.uint8)
    held = np.empty(n_cells, np.uint32)
    lib().kvg_kv_cells(
        context,
        group,
        _int32(pos),
        words.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
        _int32(shift),
        _uint8(dither),
        held.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
    )
    return CellsView(pos, functools.partial(_members, words, n_seq_max), shift, dither, held)


def _members(words: npt.NDArray[np.uint64], n_seq_max: int) -> npt.NDArray[np.bool_]:
    """(n_cells, n_seq_max), from a bit each."""
    octets = words.astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=n_seq_max, bitorder="little").view(np.bool_)


def read_bounds(context: int, n_seq_max: int) -> list[ctypes.Array[ctypes.c_int32]]:
    """Of every sequence: first position, last position, number of cells."""
    bounds = [(ctypes.c_int32 * n_seq_max)() for _ in range(3)]
    lib().kvg_kv_seq_bounds(context, *bounds)
    return bounds


def read_lost(context: int, group: int, n_seq_max: int) -> npt.NDArray[np.int32]:
    """Of every sequence the highest position that the group's window has lost; -1: none."""
    lost = np.empty(n_seq_max, np.int32)
    lib().kvg_kv_seq_lost(context, group, _int32(lost))
    return lost


def read_geometry(context: int) -> Geometry:
    """What a saved row must fit."""
    info = read_info(context)
    groups = tuple(_group_geometry(context, info, index) for index in range(info.n_groups))
    return Geometry(fingerprint(lib().kvg_context_gguf(context)), groups)


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


def take(context: int, geometry: Geometry, seq: int | None) -> bytes:
    """The cells of a sequence, or with None of all of them, as a saved state; K at its positions."""
    info = read_info(context)
    seqs = slice(None) if seq is None else [integer(seq, "seq", 0, info.n_seq_max - 1)]
    chosen, tables = [], []
    for index in range(info.n_groups):
        view = read_cells(context, index)
        seen = view.seq[:, seqs]
        cells = np.flatnonzero(seen.any(axis=1))
        cells = cells[np.argsort(view.pos[cells], kind="stable")].astype(np.int32)
        chosen.append(cells)
        tables.append((view.pos[cells], seen[cells], read_lost(context, index, info.n_seq_max)[seqs]))

    def fill(index: int, rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        request = sized(
            KvgKvReadRequest,
            group=index,
            layer_begin=0,
            layer_end=geometry.groups[index].n_layer,
            cells=_int32(chosen[index]),
            n_cells=len(chosen[index]),
            data=_uint8(rows),
            n_bytes=rows.size,
            dither=_uint8(dither),
        )
        lib().kvg_kv_read_rows(context, ctypes.byref(request))

    return pack(geometry, seq is None, tables, fill)


def put(context: int, saved: SavedState, seq: int | None) -> None:
    """Replaces a sequence, or with None the whole cache, in every group; all or nothing."""
    n_seq_max = read_info(context).n_seq_max
    if seq is not None:
        integer(seq, "seq", 0, n_seq_max - 1)
    seen = [_seen(cells, n_seq_max, seq) for cells in saved.groups]
    lost = [_lost(cells, n_seq_max, seq) for cells in saved.groups]
    rows = (KvgKvRows * len(saved.groups))()
    for index, cells in enumerate(saved.groups):
        rows[index] = sized(
            KvgKvRows,
            n_cells=len(cells.pos),
            pos=_int32(cells.pos),
            seq=_uint8(seen[index]),
            dither=_uint8(cells.dither),
            lost=_int32(lost[index]),
            data=_uint8(cells.rows),
            n_bytes=cells.rows.size,
        )
    lib().kvg_kv_replace(context, -1 if seq is None else seq, rows, len(rows))


def _seen(cells: SavedCells, n_seq_max: int, seq: int | None) -> npt.NDArray[np.uint8]:
    """(n_cells, n_seq_max) of 0 and 1: who sees the cells here."""
    seen = np.zeros((len(cells.pos), n_seq_max), np.uint8)
    if seq is not None:
        seen[:, seq] = 1
        return seen
    ids = np.flatnonzero(cells.seq.any(axis=0))
    if len(ids) and ids[-1] >= n_seq_max:
        raise StateError(
            f"the state has sequence {ids[-1]}, and this cache has {n_seq_max} (n_seq_max): open the context "
            "with more"
        )
    seen[:, ids] = cells.seq[:, ids]
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


def _int32(array: npt.NDArray[np.signedinteger[Any]]) -> ctypes._Pointer[ctypes.c_int32]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def _uint8(array: npt.NDArray[np.uint8]) -> ctypes._Pointer[ctypes.c_uint8]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))

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
from pykvgraph.errors import StateError, UnsupportedError
from pykvgraph.gguf_file import fingerprint
from pykvgraph.state.format import HADAMARD, Geometry, SavedCells, pack
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


def read_geometry(context: int) -> Geometry:
    """What a saved row must fit."""
    info = read_info(context)
    if info.n_groups > 1:
        raise UnsupportedError("states of models with several groups of cells can't be saved yet")
    group = read_group(context, 0)
    return Geometry(
        fingerprint(lib().kvg_context_gguf(context)),
        info.n_layer,
        group.n_head_kv,
        group.head_dim_k,
        group.head_dim_v,
        info.type_k + HADAMARD * group.hadamard_k,
        info.type_v + HADAMARD * group.hadamard_v,
        info.cell_bytes,
    )


def take(context: int, geometry: Geometry, seq: int | None) -> bytes:
    """The cells of a sequence, or with None all, as a saved state, rotated to their positions."""
    info = read_info(context)
    seqs = slice(None) if seq is None else [integer(seq, "seq", 0, info.n_seq_max - 1)]
    view = read_cells(context, 0)
    seen = view.seq[:, seqs]
    chosen = np.flatnonzero(seen.any(axis=1))
    chosen = chosen[np.argsort(view.pos[chosen], kind="stable")].astype(np.int32)

    def fill(rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        request = sized(
            KvgKvReadRequest,
            group=0,
            layer_begin=0,
            layer_end=geometry.n_layer,
            cells=_int32(chosen),
            n_cells=len(chosen),
            data=_uint8(rows),
            n_bytes=rows.size,
            dither=_uint8(dither),
        )
        lib().kvg_kv_read_rows(context, ctypes.byref(request))

    return pack(geometry, seq is None, view.pos[chosen], seen[chosen], fill)


def put(context: int, saved: SavedCells, seq: int | None) -> None:
    """Replaces a sequence, or with None the whole cache, all or nothing."""
    info = read_info(context)
    seen = np.zeros((len(saved.pos), info.n_seq_max), np.uint8)
    if seq is not None:
        seen[:, integer(seq, "seq", 0, info.n_seq_max - 1)] = 1
    else:
        ids = np.flatnonzero(saved.seq.any(axis=0))
        if len(ids) and ids[-1] >= info.n_seq_max:
            raise StateError(
                f"the state has sequence {ids[-1]}, and this cache has {info.n_seq_max} (n_seq_max): open "
                "the context with more"
            )
        seen[:, ids] = saved.seq[:, ids]
    rows = sized(
        KvgKvRows,
        n_cells=len(saved.pos),
        pos=_int32(saved.pos),
        seq=_uint8(seen),
        dither=_uint8(saved.dither),
        data=_uint8(saved.rows),
        n_bytes=saved.rows.size,
    )
    lib().kvg_kv_replace(context, -1 if seq is None else seq, ctypes.byref(rows), 1)


def _int32(array: npt.NDArray[np.signedinteger[Any]]) -> ctypes._Pointer[ctypes.c_int32]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def _uint8(array: npt.NDArray[np.uint8]) -> ctypes._Pointer[ctypes.c_uint8]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))

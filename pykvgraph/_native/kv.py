"""What is in a native cache, without K and V. All take a context's pointer, within one Handle.call."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgGroupInfo, KvgKvInfo, KvgLayerInfo
from pykvgraph._native.library import lib, sized
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
    lib().kvg_kv_group_layers(context, group, int32(layers))
    return tuple(layers.tolist())


def read_cells(context: int, group: int) -> CellsView:
    """A snapshot of every cell of one group."""
    info = read_group(context, group)
    n_cells, n_seq_max = info.n_cells, read_info(context).n_seq_max
    pos = np.empty(n_cells, np.int32)
    words = np.empty((n_cells, (n_seq_max + 63) // 64), np.uint64)
    shift = np.empty(n_cells, np.int32)
    dither = np.empty(n_cells, np.uint8)
    held = np.empty(n_cells, np.uint32)
    lib().kvg_kv_cells(
        context,
        group,
        int32(pos),
        words.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
        int32(shift),
        uint8(dither),
        held.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
    )
    seq = functools.partial(_members, words, n_seq_max)
    return CellsView(pos, seq, shift, dither, held, settled=bool(info.settled))


def read_state_layers(context: int) -> tuple[int, ...]:
    """The layers with a state."""
    layers = (ctypes.c_int32 * read_info(context).n_state_layers)()
    lib().kvg_kv_state_layers(context, layers)
    return tuple(layers)


def read_state_columns(context: int) -> dict[int, npt.NDArray[np.intp]]:
    """Of each layer with a state, which numbers of a row are its own."""
    columns, begin, info = {}, 0, sized(KvgLayerInfo)
    for layer in read_state_layers(context):
        lib().kvg_gguf_get_layer(lib().kvg_context_gguf(context), layer, ctypes.byref(info))
        columns[layer] = np.arange(begin, begin + info.state_bytes // 4)
        begin += info.state_bytes // 4
    return columns


def read_states(context: int) -> CellsView:
    """A snapshot of every row of recurrent states."""
    info = read_info(context)
    pos = np.empty(info.n_states, np.int32)
    words = np.empty((info.n_states, (info.n_seq_max + 63) // 64), np.uint64)
    held = np.empty(info.n_states, np.uint32)
    lib().kvg_kv_states(
        context,
        int32(pos),
        words.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
        held.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
    )
    no_shift, no_dither = np.zeros(info.n_states, np.int32), np.zeros(info.n_states, np.uint8)
    return CellsView(pos, functools.partial(_members, words, info.n_seq_max), no_shift, no_dither, held)


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
    lib().kvg_kv_seq_lost(context, group, int32(lost))
    return lost


def read_checkpoints(context: int, seq: int) -> list[int]:
    """The positions of a sequence's checkpoints, in rising order."""
    there = ctypes.c_int64()
    lib().kvg_kv_checkpoints(context, seq, None, 0, ctypes.byref(there))
    positions = (ctypes.c_int64 * there.value)()
    lib().kvg_kv_checkpoints(context, seq, positions, there.value, ctypes.byref(there))
    return list(positions)


def int32(array: npt.NDArray[np.signedinteger[Any]]) -> ctypes._Pointer[ctypes.c_int32]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def uint8(array: npt.NDArray[np.uint8]) -> ctypes._Pointer[ctypes.c_uint8]:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))

"""Rows of a layer's cells on their way to another cache of this process: on a device they stay there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib


class PackedRows(Closable):
    """K and V of some cells in a layer. Its length is in bytes.

    context: a context's pointer, within one Handle.call. layer: an index into the group's layers. row_bytes:
    K and V of a cell in one. Raises DeviceError when there is no memory for them.
    """

    def __init__(
        self, context: int, group: int, layer: int, cells: npt.NDArray[np.int32], row_bytes: int
    ) -> None:
        pointer = cells.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._handle = Handle.open(
            lambda out: lib().kvg_kv_pack(context, group, layer, pointer, len(cells), out),
            free=lib().kvg_packed_free,
            name="packed rows",
            shared=True,
        )
        self._handle.stay()
        self._n_bytes = len(cells) * row_bytes

    def __len__(self) -> int:
        return self._n_bytes

    @property
    def pointer(self) -> int:
        """Keep this object until the native call that gets the pointer has returned."""
        return self._handle.call(int)


@dataclass(frozen=True)
class PackedGroup:
    """Of each layer of a group, its rows; None: they are elsewhere.

    which: (n_cells,) the row of each cell.
    """

    layers: tuple[PackedRows | None, ...]
    which: npt.NDArray[np.int32]

    def of(self, cells: npt.NDArray[np.signedinteger]) -> PackedGroup:
        """Of some of these cells."""
        return replace(self, which=np.ascontiguousarray(self.which[cells]))

    def pointers(self) -> ctypes.Array[ctypes.c_void_p]:
        """For kvg_kv_rows; while this object lives."""
        found = [None if rows is None else rows.pointer for rows in self.layers]
        return (ctypes.c_void_p * len(found))(*found)

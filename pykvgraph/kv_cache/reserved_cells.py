"""Rows of K and V, read from a cache by layers, or written into reserved cells while the context decodes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgIncomingRows, KvgKvPlace, KvgKvReadRequest
from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import indices, integer, integers, several, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.pending_token import PendingTokens


class RawRows(NamedTuple):
    """K and V of some cells as the cache stores them, in bytes of the cache's types.

    data: for each layer, the K rows of all the cells, then their V rows.
    """

    data: npt.NDArray[np.uint8]  # (n_bytes,)
    dither: npt.NDArray[np.uint8]  # (n_cells,): the number of the dither in each cell's K (state-format.md)


class Place(NamedTuple):
    """The cells to reserve in one group: one cell for each position."""

    positions: Sequence[int]  # strictly increasing
    dither: npt.NDArray[np.uint8] | None = None  # (n_cells,), as in RawRows; None: K has no dither


class Incoming(Closable):
    """Cells that `kv.reserve()` took, to be filled with rows from outside and then shown to a sequence.

    The order of calls: write() for every layer and cell, in any thread; then show(), or give_back(). close()
    gives the cells back, unless they were shown.

    While cells are reserved no sequence sees them, and defrag doesn't move them. write() doesn't wait for a
    running call on the context, and calls on the context don't wait for write().
    """

    def __init__(self, context: Handle, places: Sequence[Place], pending: PendingTokens) -> None:
        self._context = context
        self._pending = pending
        chosen = several(places)
        if chosen is None:
            raise InvalidArgumentError(f"places must be a list of Place, got {shown(places)}")
        held = [_place(index, place) for index, place in enumerate(chosen)]
        structs = (KvgKvPlace * len(held))(*(struct for struct, *_ in held))

        def reserve(pointer: int, out: Any) -> None:
            lib().kvg_kv_reserve(pointer, structs, len(held), out)

        self._handle = Handle.open(
            lambda out: context.call(reserve, out), free=lib().kvg_incoming_free, name="reservation"
        )
        self._handle.changes(context)

    def write(
        self,
        group: int,
        layers: range,
        cells: range,
        data: npt.NDArray[np.uint8] | bytes | memoryview,
        dither: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Writes rows, in the order of RawRows.data, into some layers of some of the reserved cells.

        group: index into `kv.groups`. layers: indices into that group's `layers`. cells: indices into the
        positions of the group's Place. dither: (n_cells,), as in RawRows, of these cells; None: as the Place
        has it. The values are not checked: NaN or infinity may spoil the outputs of other sequences.

        Raises InvalidArgumentError for a range that is out of bounds, for another number of bytes than these
        rows have, or of dithers than there are cells, and after show(), give_back() or `kv.clear()`.
        """
        layers, cells = indices(layers, "layers"), indices(cells, "cells")
        try:
            rows = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError, BufferError):  # no buffer, or one with gaps
            raise InvalidArgumentError(f"data must be bytes without gaps, got {shown(data)}") from None
        given = None if dither is None else _dithers(dither, len(cells), "dither")
        request = sized(
            KvgIncomingRows,
            group=integer(group, "group"),
            layer_begin=layers.start,
            layer_end=layers.stop,
            cell_begin=cells.start,
            cell_end=cells.stop,
            data=_address(rows, ctypes.c_uint8),
            n_bytes=rows.size,
            dither=None if given is None else _address(given, ctypes.c_uint8),
        )
        self._handle.call(lib().kvg_incoming_write, ctypes.byref(request))

    def show(self, seq: int, state: npt.NDArray[np.float32] | None = None) -> None:
        """From now on sequence `seq` sees the cells; nothing is copied.

        state: float32 (state_bytes / 4,), of recurrent layers at the sequence's end; None: nobody knows it,
        and the sequence can't go on. Raises CacheFullError, with nothing changed, when there is no room.

        Raises InvalidArgumentError, with nothing changed, when rows were not written yet, when the sequence
        has a position at or after the first reserved one, and after give_back() or `kv.clear()`.
        """
        self._show(lib().kvg_kv_show, seq, state)

    def show_text(self, seq: int, state: npt.NDArray[np.float32] | None = None) -> None:
        """As show(), for a text, which begins at position 0; `seq` can go on behind it.

        What comes before a window's rows is lost there. They may begin before the sequence's end, where the
        window has lost what they bring. state: float32 (state_bytes / 4,), of recurrent layers at the text's
        end; None: nobody knows it. Raises CacheFullError, too, when there is no room for the state.
        """
        self._show(lib().kvg_kv_show_text, seq, state)

    def give_back(self) -> None:
        """Makes the cells empty again, unless they were shown: then nothing happens."""
        self._handle.call(
            lambda incoming: self._context.call(lambda pointer: lib().kvg_kv_give_back(pointer, incoming))
        )

    def _show(self, function: Any, seq: int, state: npt.NDArray[np.float32] | None) -> None:
        seq = integer(seq, "seq")
        row = None if state is None else _address(np.ascontiguousarray(state, np.float32), ctypes.c_float)
        self._handle.call(
            lambda incoming: self._context.call(lambda pointer: function(pointer, incoming, seq, row))
        )
        self._pending.drop(seq)


def read_rows(
    context: int,
    group: int,
    layers: range,
    cells: Sequence[int] | npt.NDArray[np.int32],
    row_bytes: int,
) -> RawRows:
    """Reads rows of cells. layers: indices into the group's layers. row_bytes: K and V of a cell in one."""
    return read_rows_of(context, group, layers, integers(cells, "cells", 0), row_bytes)


def read_rows_of(
    context: int, group: int, layers: range, chosen: npt.NDArray[np.int32], row_bytes: int
) -> RawRows:
    """As read_rows(), of cells that the cache has told of."""
    rows = RawRows(np.empty(len(layers) * len(chosen) * row_bytes, np.uint8), np.empty(len(chosen), np.uint8))
    request = sized(
        KvgKvReadRequest,
        group=group,
        layer_begin=layers.start,
        layer_end=layers.stop,
        cells=_address(chosen, ctypes.c_int32),
        n_cells=len(chosen),
        data=_address(rows.data, ctypes.c_uint8),
        n_bytes=rows.data.size,
        dither=_address(rows.dither, ctypes.c_uint8),
    )
    lib().kvg_kv_read_rows(context, ctypes.byref(request))
    return rows


def _place(index: int, place: Place) -> tuple[KvgKvPlace, Any, Any]:
    """The native struct of a place, and the two arrays that it points to, which must live as long."""
    if not isinstance(place, Place):
        raise InvalidArgumentError(f"places[{index}] must be a pykvgraph.Place, got {shown(place)}")
    positions = integers(place.positions, f"places[{index}].positions", 0)
    if place.dither is None:
        dither = np.zeros(len(positions), np.uint8)
    else:
        dither = _dithers(place.dither, len(positions), f"places[{index}].dither")
    struct = sized(
        KvgKvPlace,
        n_cells=len(positions),
        pos=_address(positions, ctypes.c_int32),
        dither=_address(dither, ctypes.c_uint8),
    )
    return struct, positions, dither


def _dithers(given: npt.NDArray[np.uint8], n_cells: int, what: str) -> npt.NDArray[np.uint8]:
    dither = integers(given, what, 0, 255).astype(np.uint8)
    if dither.shape != (n_cells,):
        raise InvalidArgumentError(f"{what} has shape {dither.shape}, and there are {n_cells} cells")
    return dither


def _address(array: npt.NDArray[Any], ctype: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctype))

"""Rows of K and V out of a cache by layers, and back into one piece by piece while its context decodes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgIncomingRows, KvgKvPlace, KvgKvReadRequest
from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import integer, integers
from pykvgraph.errors import InvalidArgumentError


class RawRows(NamedTuple):
    """Raw K and V of some cells: for each layer K then V, a row for each cell."""

    data: npt.NDArray[np.uint8]  # (n_bytes,)
    dither: npt.NDArray[np.uint8]  # (n_cells,): what K carries (docs/state-format.md)


class Place(NamedTuple):
    """Where cells of one group come to."""

    positions: Sequence[int]  # rising
    dither: npt.NDArray[np.uint8] | None = None  # (n_cells,), as RawRows has it; None: K was written once


class Incoming(Closable):
    """Cells that `kv.reserve()` took: written in any thread, then shown to a sequence. closed: given back.

    While they are reserved nobody sees them, and they stay where they are. `write` doesn't wait for the
    context's calls, nor do these wait for it.
    """

    def __init__(self, context: Handle, places: Sequence[Place]) -> None:
        self._context = context
        held = [_place(index, place) for index, place in enumerate(places)]
        structs = (KvgKvPlace * len(held))(*(struct for struct, *_ in held))

        def reserve(pointer: int, out: Any) -> None:
            lib().kvg_kv_reserve(pointer, structs, len(held), out)

        self._handle = Handle.open(
            lambda out: context.call(reserve, out), free=lib().kvg_incoming_free, name="reservation"
        )

    def write(
        self, group: int, layers: range, cells: range, data: npt.NDArray[np.uint8] | bytes | memoryview
    ) -> None:
        """Rows as RawRows has them, for these layers and cells, by their places in the group and among the
        reserved cells.

        Raises InvalidArgumentError for ranges that can't be, another number of bytes, or when the cells were
        shown or given back, or the cache was cleared. Values are taken as they are: what is not finite may
        reach other sequences.
        """
        rows = np.frombuffer(data, np.uint8)
        request = sized(
            KvgIncomingRows,
            group=integer(group, "group"),
            layer_begin=layers.start,
            layer_end=layers.stop,
            cell_begin=cells.start,
            cell_end=cells.stop,
            data=_address(rows, ctypes.c_uint8),
            n_bytes=rows.size,
        )
        self._handle.call(lib().kvg_incoming_write, ctypes.byref(request))

    def show(self, seq: int) -> None:
        """Sequence `seq`, which must end before the first position, sees the cells; nothing is copied.

        Raises InvalidArgumentError, with nothing changed, while rows are missing.
        """
        seq = integer(seq, "seq")
        self._handle.call(
            lambda incoming: self._context.call(lambda pointer: lib().kvg_kv_show(pointer, incoming, seq))
        )

    def give_back(self) -> None:
        """The cells are empty again, when they were not shown."""
        self._handle.call(
            lambda incoming: self._context.call(lambda pointer: lib().kvg_kv_give_back(pointer, incoming))
        )


def read_rows(context: int, group: int, layers: range, cells: Sequence[int], row_bytes: int) -> RawRows:
    """Rows of these cells in the group's layers, by their places in it; row_bytes: of a cell in a layer."""
    chosen = integers(cells, "cells", 0)
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
    """The struct, and what it points to."""
    positions = integers(place.positions, f"places[{index}].positions", 0)
    if place.dither is None:
        dither = np.zeros(len(positions), np.uint8)
    else:
        dither = np.ascontiguousarray(place.dither, np.uint8)
    if dither.shape != positions.shape:
        raise InvalidArgumentError(
            f"places[{index}] has {len(positions)} positions and dither of shape {dither.shape}"
        )
    struct = sized(
        KvgKvPlace,
        n_cells=len(positions),
        pos=_address(positions, ctypes.c_int32),
        dither=_address(dither, ctypes.c_uint8),
    )
    return struct, positions, dither


def _address(array: npt.NDArray[Any], ctype: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctype))

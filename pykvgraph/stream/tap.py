"""Rows of a sequence's new tokens as soon as a layer has written them; others are computed meanwhile."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgTapped, KvgTapTold
from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib, sized

_LONGEST_WAIT = 500  # milliseconds: a process that ends waits for calls


class Tapped(NamedTuple):
    """A layer's rows of some new tokens: K of each, then V. layer: an index into the group's layers.

    is_mark: it has no rows: what `mark` has put there.
    """

    group: int
    layer: int
    positions: npt.NDArray[np.int32]
    rows: npt.NDArray[np.uint8]

    @property
    def is_mark(self) -> bool:
        return not len(self.positions)


class TapReport(NamedTuple):
    """What decodes did with tokens of the sequence since the last report.

    n_decodes: how many succeeded. first: the lowest position that they decoded, -1: none. taken: the last
    position whose rows were taken, also of a decode that failed; -1: none.
    """

    n_decodes: int
    first: int
    taken: int


class Tap(Closable):
    """Takes the rows that decodes with several tokens of a sequence write, layer by layer.

    max_bytes: of rows that nobody has taken; a decode doesn't wait, so beyond them the tap is over. 0: no
    rows are taken.
    """

    def __init__(self, context: Handle, seq: int, max_bytes: int) -> None:
        self._context = context

        def open_tap(pointer: int) -> int:
            made = ctypes.c_void_p()
            lib().kvg_tap_open(pointer, seq, max_bytes, ctypes.byref(made))
            return made.value or 0

        # shared: one thread waits for what comes while another one marks
        self._handle = Handle.own(context.call, open_tap, free=lib().kvg_tap_free, name="tap", shared=True)

    def tell(self) -> TapReport:
        """A call on the context."""
        told = sized(KvgTapTold)

        def tell(tap: int) -> None:
            self._context.call(lib().kvg_tap_tell, tap, ctypes.byref(told))

        self._handle.call(tell)
        return TapReport(told.n_decodes, told.first, told.taken)

    def mark(self) -> None:
        """What comes after this was computed later. It wakes the thread that waits."""
        self._handle.call(lib().kvg_tap_mark)

    def next(self) -> Tapped:
        """What came first; waits for it. Raises DeviceError when the tap is over."""
        while True:
            found = self._handle.call(_next, _LONGEST_WAIT)
            if found is not None:
                return found

    def now(self) -> Tapped | None:
        """What came first; None: nothing has come yet. Raises DeviceError when the tap is over."""
        return self._handle.call(_next, 0)


def _next(tap: int, milliseconds: int) -> Tapped | None:
    """None: nothing came."""
    told = sized(KvgTapped)
    lib().kvg_tap_next(tap, milliseconds, ctypes.byref(told))
    if told.group < 0:
        return None
    found = Tapped(told.group, told.layer, np.empty(told.n_cells, np.int32), np.empty(told.n_bytes, np.uint8))
    lib().kvg_tap_take(
        tap,
        found.positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
        found.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)),
        found.rows.size,
    )
    return found

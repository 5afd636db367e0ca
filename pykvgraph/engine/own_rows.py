"""The rows of a text that has shifted, while it has no sequence."""

from __future__ import annotations

import contextlib

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.hold import Hold
from pykvgraph.kv_cache.reserved_cells import Place
from pykvgraph.kv_cache.saved.format import unpack
from pykvgraph.kv_cache.saved.transfer import take_held
from pykvgraph.prefix.node import Root


class OwnRows:
    """Rows of n tokens, which nobody could decode again: those that they have seen are gone.

    n_rows: how many there are; n may become less.

    They stay in the cells, which no other text begins with, until copy() brings them to host memory. All
    groups of the cache keep every position, or the text could not have shifted.
    """

    def __init__(self, kv: KVCache, seq: int, n: int, root: Root) -> None:
        """Of the first n tokens of a sequence. root: of what the index has of it. Raises MemoryError."""
        self.n = n
        self.n_rows = n
        self.root = root
        self._kv = kv
        self._hold: Hold | None = kv.hold(seq, 0, n)
        self._copy = b""

    @property
    def n_cells(self) -> int:
        """How many cells they have: n, or none after copy()."""
        return self.n_rows if self._hold is not None else 0

    def copy(self) -> None:
        """Their cells are free. After DeviceError or MemoryError they are where they were."""
        assert self._hold is not None
        kv = self._kv
        self._copy = kv._handle.call(take_held, kv._geometry, self._hold._id, range(self.n_rows), None)
        self._release()

    def show(self, seq: int) -> None:
        """From now on an empty sequence has them, too; copies need n empty cells.

        After DeviceError or MemoryError the sequence is empty, and they are where they were.
        """
        if self._hold is not None:
            self._kv.attach(self._hold, seq)
        else:
            self._write(seq)
        if self.n < self.n_rows:
            self._kv.seq_rm(seq, self.n, -1)

    def give_up(self) -> None:
        """They are the sequence's alone, or nobody needs them any more."""
        self._copy = b""
        if self._hold is not None:
            self._release()

    def _write(self, seq: int) -> None:
        """Into empty cells; until the sequence sees them, nothing is changed."""
        kv = self._kv
        groups = unpack(self._copy, kv._geometry, kv._room).groups
        n = self.n_rows
        with kv.reserve([Place(range(n), cells.dither) for cells in groups]) as incoming:
            for index, (cells, group) in enumerate(zip(groups, kv._geometry.groups, strict=True)):
                if group.layers:
                    incoming.write(index, range(group.n_layer), range(n), cells.rows)
            incoming.show_text(seq)

    def _release(self) -> None:
        hold, self._hold = self._hold, None
        assert hold is not None
        with contextlib.suppress(InvalidArgumentError):  # kv.clear() has ended it
            hold.release()

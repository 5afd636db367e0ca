"""The KV cache of a context: cells, and every operation on them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgDefragPolicy, KvgUpdateStats
from pykvgraph._native.fork import importing
from pykvgraph._native.handles import Handle
from pykvgraph._native.kv import int32
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import flag, integer, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.hold import Hold, HoldMaker, ResumePoint
from pykvgraph.kv_cache.pending_token import PendingTokens
from pykvgraph.kv_cache.view import ReadableCache
from pykvgraph.types import UpdateStats

if TYPE_CHECKING:
    from pykvgraph.kv_cache.reserved_cells import Incoming, Place
    from pykvgraph.kv_cache.saved.cells import SavedState
    from pykvgraph.kv_cache.saved.geometry import Geometry

_POLICIES: dict[str, int] = {
    "fill": KvgDefragPolicy.KVG_DEFRAG_FILL,
    "sort": KvgDefragPolicy.KVG_DEFRAG_SORT,
}


class KVCache(ReadableCache):
    """The cache of a context, `context.kv`: cells, and operations on them.

    A cell is empty, or it has one token: the token's K and V in every layer, its position, and the set of
    sequences that see it. Cells are in one group, or in several (`groups`). A shared cell is one that several
    sequences see, or that a sequence sees and a hold keeps.

    A range of positions is [p0, p1): p0 <= position < p1. p0 < 0 means 0, p1 < 0 means no upper end.

    seq_add and seq_div change positions at once, but not K: the cell's K-shift is pending until K is rotated
    to the new position, by update() or the next decode. defrag() too only asks for work that update() or
    decode does. Other operations need no later work.

    Every integer argument may be any Python integer. An invalid argument raises InvalidArgumentError, with
    nothing changed; so does every call after the context is closed.
    """

    def __init__(self, handle: Handle, pending: PendingTokens) -> None:
        super().__init__(handle, pending)
        self._holds = HoldMaker(handle)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Removes sequence `seq` (below 0: every sequence) from the cells in the range.

        Cells that no sequence sees and no hold keeps any more become empty. When the sequence ends before p0
        then, p0 must be a position where every group still has what a token attends to, or a checkpoint's.

        Raises InvalidArgumentError, with nothing changed, when layers with a window have lost that; the error
        names positions where the sequence can go on.
        """
        ended = self._pending.within(seq, p0, p1, self.seq_pos_max)
        self._change(lib().kvg_kv_seq_rm, seq=seq, p0=p0, p1=p1)
        self._pending.drop(*ended)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """From now on `dst` too sees the cells of `src` in the range. They are shared: no data is copied."""
        before = self.seq_pos_max(dst) if self._pending else -1
        self._change(lib().kvg_kv_seq_cp, src=src, dst=dst, p0=p0, p1=p1)
        self._pending.copied(src, dst, p0, p1, before, self.seq_pos_max)

    def seq_keep(self, seq: int) -> None:
        """Removes every sequence but `seq`: cells that `seq` doesn't see and no hold keeps become empty."""
        self._change(lib().kvg_kv_seq_keep, seq=seq)
        self._pending.keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Adds `delta` to the positions of the sequence's cells in the range.

        A cell whose position would be below 0 is removed from the sequence. A shared cell is copied at once,
        with its K and V; the copy moves, and the other sequences and holds keep the cell as it is. If that
        cell was waiting (see update), its K may be rotated at the next update.

        Raises, with nothing changed: CacheFullError when there are too few empty cells for the copies,
        InvalidArgumentError when a position would exceed 2^31 - 1, and UnsupportedError when positions that
        layers with a window have lost would come into the window of the tokens that follow (open the context
        with swa_full=True), or when the model has learned an embedding of each position (GPT-2). Raises
        DeviceError when the device fails.
        """
        self._change(lib().kvg_kv_seq_add, seq=seq, p0=p0, p1=p1, delta=delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divides the positions of the sequence's cells in the range: pos becomes pos // d, where d >= 1.

        Shared cells are copied as in seq_add; raises what seq_add raises.
        """
        self._change(lib().kvg_kv_seq_div, seq=seq, p0=p0, p1=p1, d=d)

    def hold(self, seq: int, p0: int, p1: int) -> Hold:
        """Keeps the sequence's cells in the range in the cache, even when no sequence sees them any more.

        attach() lets another sequence see the held cells. While they are held, seq_rm, seq_keep and load
        don't empty them; seq_add and seq_div leave them as they are and move copies; defrag may move them to
        other cells. The hold ends with `Hold.release()`, with clear(), or when the program drops its last
        reference to the Hold.

        Raises InvalidArgumentError when the range is empty, or the sequence has no cell at one of its
        positions.
        """
        return self._handle.call(self._holds.hold, integer(seq, "seq"), integer(p0, "p0"), integer(p1, "p1"))

    def attach(self, hold: Hold, seq: int, p1: int = -1) -> None:
        """Appends the held cells to a sequence: from now on it sees them too. Nothing is copied or decoded.

        p1: only the cells at positions below p1; p1 < 0: all of them.

        The hold's first position must be the sequence's next one, seq_pos_max(seq) + 1; that is 0 for an
        empty sequence. Attach the holds of a whole text to an empty sequence, and its resume point last.

        The cache knows positions and no texts: that all of these are of one text is up to the program. A
        resume point replaces the last cells of layers with a window. Where layers are recurrent it is refused
        for a sequence that has decoded up to there, and so has a state of its own.

        Raises InvalidArgumentError when the hold begins at another position, or has none below p1, when it
        has ended, for a hold of another context, and for a resume point that is refused.
        """
        if not isinstance(hold, Hold) or hold._handle is not self._handle:
            raise InvalidArgumentError(f"hold must be what this cache's hold() gave, got {shown(hold)}")
        self._handle.call(lib().kvg_kv_attach, hold._id, integer(seq, "seq"), integer(p1, "p1"))
        if not isinstance(hold, ResumePoint):
            self._pending.drop(seq)

    def resume_point(self, seq: int, p: int = -1) -> ResumePoint:
        """Keeps what it takes to go on where the sequence ends, or at position p, whatever becomes of it.

        That is the last positions of layers with a window, and the state of recurrent layers. Of these hold()
        keeps none; in a model of such layers alone a hold is its positions. To go on from a
        shared prefix, attach() its holds to an empty sequence, and then its resume point. It keeps as many
        cells as the window has positions; give the context
        `checkpoint_cells` for them, and `checkpoint_bytes` for states. Raises InvalidArgumentError when the
        sequence has no cells, or could not go on there: a window has lost what it needs, or nobody has the
        state; CacheFullError when as many resume points keep states as there is room for.
        """
        return self._handle.call(self._holds.resume_point, integer(seq, "seq"), integer(p, "p"))

    def room(self, seq: int) -> list[int]:
        """How many cells each group with a window has for a sequence; -1 for a group without.

        That are empty ones, those that windows have left behind, and the sequence's own that nobody else has.
        """
        room = (ctypes.c_int64 * len(self.groups))()
        self._handle.call(lib().kvg_kv_room, integer(seq, "seq"), room)
        return list(room)

    def checkpoint(self, seq: int) -> int:
        """Keeps what it takes to come back, with rewind(), to where the sequence ends; returns that position.

        Like a resume point, but it moves with the sequence (seq_add), and the cache drops it: when positions
        around its own are removed, or all before it; when seq_div or another token comes before it; when a
        move would bring into its window what the window has lost; and when a group needs the cells, or a
        decode or a load the room of its state.

        Then the one goes first, of all sequences, that is nearest to another of its sequence, or to position
        0; of equally near ones the one whose making, or whose last use by rewind() or seq_rm(), is longest
        ago. None goes for what would find no room even without all of them. Raises InvalidArgumentError when
        the sequence has no cells, or a window has lost what it takes to go on where the sequence ends.
        """
        position = ctypes.c_int64()
        self._handle.call(lib().kvg_kv_checkpoint, integer(seq, "seq"), ctypes.byref(position))
        return position.value

    def rewind(self, seq: int, p: int) -> int:
        """Goes back to the largest position <= p from which decoding can go on, and returns it.

        That is p itself where no window has lost what it needs and no layer is recurrent, else a checkpoint's
        position, else 0. The sequence's cells from there on are removed. A p beyond its end removes nothing.
        """
        position = ctypes.c_int64()
        numbers = integer(seq, "seq"), integer(p, "p")
        ended = self._pending.within(seq, p, -1, self.seq_pos_max)
        self._handle.call(lib().kvg_kv_rewind, *numbers, ctypes.byref(position))
        self._pending.drop(*ended)
        return position.value

    def set_pending_token(self, seq: int, token: int | None) -> None:
        """Sets the sequence's pending token, or with None drops it."""
        self._pending.choose(self._known_seq(seq), token)

    def clear(self, data: bool = False) -> None:
        """Empties every cell, ends every hold, and zeroes K, V and states that were ever written.

        data: zeroes the K and V of all cells.
        """
        self._handle.call(lib().kvg_kv_clear, flag(data, "data"))
        self._pending.drop_all()
        self._forget_others()

    def defrag(self, policy: Literal["fill", "sort"] = "fill") -> None:
        """Asks for compaction: the next update() or decode moves cells so that no hole is left.

        A hole is an empty cell below the highest used one. "fill" moves cells from the end into the holes,
        with the fewest moves. "sort" orders all cells: cells that the same set of sequences sees come
        together, by position; larger sets come first, then sets with a lower lowest id; cells that only holds
        keep come last, in their present order.
        """
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise InvalidArgumentError(f'policy must be "fill" or "sort", got {shown(policy)}')
        self._handle.call(lib().kvg_kv_defrag, _POLICIES[policy])

    def update(self) -> UpdateStats:
        """Runs the defrag and then the K-shift that are pending, and returns what was done.

        The K-shift rotates the K of each cell whose position was moved. Rotating a quantized K rounds it
        again. So with a quantized K on the CPU, most cells whose K-shift is pending are left waiting: their K
        stays as it is, and attention rotates the queries in the opposite direction, which gives the same
        result without rounding. `cells().shift` is not 0 for these cells, UpdateStats.waiting_cells counts
        them, and they may wait for as long as they are in the cache. A cell waits when at least 64 cells have
        the same shift, with 32 of them on average in each chunk of 128 cells; otherwise its K is rotated.

        Cells of all sequences count for this. So an operation on one sequence (seq_rm; seq_add and seq_div,
        also through the copies they make) can leave too few cells of another sequence with the same shift.
        The next update then rotates their K, which rounds it once.

        Raises DeviceError when the device fails or has too little memory for the graphs. Work that was not
        done is then still pending, and the next update() goes on with it. But a K-shift or a sorting defrag
        that fails in the middle leaves K and V unusable: after that, every call that needs them raises
        DeviceError until `clear()` or `Context.reset()`.
        """
        return self._stats(lib().kvg_kv_update)

    def take_stats(self) -> UpdateStats:
        """The sum of the updates that decode, read_k, read_rows and save ran since the last take_stats().

        waiting_cells is not a sum: it is the number after the last of these updates, or 0 if there was none.
        """
        return self._stats(lib().kvg_kv_take_stats)

    def reserve(self, places: Sequence[Place]) -> Incoming:
        """Reserves empty cells, whose K and V the program then writes piece by piece (Incoming).

        places: one Place for each group of `groups`, in their order, all with the same positions. Raises,
        with nothing reserved: CacheFullError when a group has too few empty cells, InvalidArgumentError when
        positions are not strictly increasing, or differ between groups.
        """
        with importing:
            from pykvgraph.kv_cache.reserved_cells import Incoming
        return Incoming(self._handle, places, self._pending)

    def save(self, seq: int | None = None) -> bytes:
        """The cells of one sequence, or with None the whole cache, as bytes (docs/state-format.md).

        All groups of cells and the checkpoints are in it. Holds are not, nor are their cells that no sequence
        sees. A pending K-shift runs first. The K of waiting cells (see update) is rotated in the bytes only,
        and so rounded once more there than in the cache. Raises InvalidArgumentError for an id out of range.
        """
        return self._save(seq, self._saved_geometry)

    def _save(self, seq: int | None, geometry: Geometry) -> bytes:
        """geometry: what the state will fit."""
        with importing:
            from pykvgraph.kv_cache.saved.transfer import take
        return self._handle.call(take, geometry, seq, self._pending.saved)

    def load(self, blob: bytes | bytearray | memoryview, seq: int | None = None) -> None:
        """Replaces sequence `seq`, or with None the whole cache, by a state that save() returned.

        All or nothing. A sequence may be loaded under another id than it was saved with, and takes any empty
        cells. Holds and their cells stay as they are, and pending work on other cells stays pending. Where
        windows have less room than in the cache that was saved (swa_full, perhaps), they take the last cells,
        and those checkpoints, from the highest position on, that find room.

        Raises, with nothing changed: StateError for a state that is damaged, from another model, or from a
        cache of another kind; CacheFullError when there are too few empty cells; InvalidArgumentError when
        the state of one sequence is loaded without `seq`, or that of a whole cache with it. Raises
        DeviceError when the device fails; if that happens while K and V are written, the cache must be
        cleared, as update() says.
        """
        self._load_as(blob, seq, self._saved_geometry)

    def _seq_rm_at(self, seq: int, positions: npt.NDArray[np.int64]) -> None:
        """seq_rm() of single positions, rising, before the sequence's last one, all or nothing."""
        given = np.ascontiguousarray(positions, np.int32)
        self._handle.call(lib().kvg_kv_seq_rm_at, seq, int32(given), len(given))

    def _load_as(self, blob: bytes | bytearray | memoryview, seq: int | None, geometry: Geometry) -> None:
        """geometry: what the state must fit."""
        try:
            data = memoryview(blob).cast("B")
        except (TypeError, ValueError):  # no buffer, or one with gaps
            raise InvalidArgumentError(f"the state must be bytes, got {shown(blob)}") from None
        with importing:
            from pykvgraph.kv_cache.saved.format import unpack
        self._load(unpack(data, geometry, self._room), seq)

    def _load(self, saved: SavedState, seq: int | None) -> None:
        if saved.whole != (seq is None):
            raise InvalidArgumentError(
                "this state holds a whole cache: load it without seq"
                if saved.whole
                else "this state holds one sequence: say which one it becomes, load(blob, seq=...)"
            )
        with importing:
            from pykvgraph.kv_cache.saved.transfer import put
        self._pending.check(saved.pending, seq, self._n_seq_max)
        self._handle.call(put, self._geometry, saved, seq)
        self._pending.load(saved.pending, seq)

    def save_file(self, path: str | os.PathLike[str], seq: int | None = None) -> None:
        """Writes what save(seq) returns into a file.

        The data goes into a temporary file first, which is synced to the disk and then renamed to `path`: at
        every moment `path` is the complete old file or the complete new one. An existing file keeps its
        permissions; a new one is its owner's alone (0600).

        Raises what save() raises; InvalidArgumentError when `path` is a device, a pipe or a socket; OSError,
        which names the path, when the file can't be written.
        """
        with importing:
            from pykvgraph.kv_cache.saved.file import write_file
        write_file(path, self.save(seq))

    def load_file(self, path: str | os.PathLike[str], seq: int | None = None) -> None:
        """Loads a file that save_file() wrote, as load() does.

        Raises what load() raises; OSError when the file can't be read (FileNotFoundError when it is missing);
        StateError when `path` is a device or a pipe. K and V are read last: they are not read from a file
        that is no saved state, is cut short, or doesn't fit into the cache.
        """
        with importing:
            from pykvgraph.kv_cache.saved.file import read_file
        self._load(read_file(path, self._saved_geometry, self._room), seq)

    def _change(self, function: Any, **arguments: int) -> None:
        self._handle.call(function, *(integer(value, name) for name, value in arguments.items()))

    def _stats(self, function: Any) -> UpdateStats:
        stats = sized(KvgUpdateStats)
        self._handle.call(function, ctypes.byref(stats))
        return UpdateStats(**{name: getattr(stats, name) for name, *_ in stats._fields_[1:]})

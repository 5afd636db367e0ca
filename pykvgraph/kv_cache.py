"""The KV cache of a context: cells, and every operation on them."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgDefragPolicy, KvgGroupInfo, KvgKvInfo, KvgUpdateStats
from pykvgraph._native.fork import renew_cached_properties_in_child
from pykvgraph._native.handles import Handle, NotCopied, repr_of
from pykvgraph._native.library import lib, sized
from pykvgraph.cell_groups import read_cell_group, read_state_groups
from pykvgraph.checks import flag, indices, integer, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.gguf_file import native_path
from pykvgraph.hold import Hold, HoldMaker, ResumePoint
from pykvgraph.incoming import Incoming, Place, RawRows, read_rows
from pykvgraph.maps.snapshot import CellMap
from pykvgraph.pending import PendingTokens
from pykvgraph.sizes import size_text
from pykvgraph.state.cells import SavedState
from pykvgraph.state.file import read_file, write_file
from pykvgraph.state.format import unpack
from pykvgraph.state.geometry import Geometry
from pykvgraph.state.transfer import (
    put,
    read_bounds,
    read_cells,
    read_checkpoints,
    read_geometry,
    read_group,
    read_info,
    read_lost,
    read_states,
    take,
)
from pykvgraph.types import CellGroup, CellsView, SeqBounds, SeqCount, UpdateStats

_POLICIES: dict[str, int] = {
    "fill": KvgDefragPolicy.KVG_DEFRAG_FILL,
    "sort": KvgDefragPolicy.KVG_DEFRAG_SORT,
}

Blob: TypeAlias = bytes  # `bytes` is a property below


class _KnownBounds(NamedTuple):
    """seq_pos_min and seq_pos_max of every sequence, after so many calls on the context."""

    n_calls: int
    pos_min: list[int]
    pos_max: list[int]


class KVCache(NotCopied):
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
        self._handle = handle
        self._pending = pending
        self._bounds = _KnownBounds(-1, [], [])
        self._holds = HoldMaker(handle)

    @functools.cached_property
    def _geometry(self) -> Geometry:
        return self._handle.call(read_geometry)

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
        with swa_full=True). Raises DeviceError when the device fails.
        """
        self._change(lib().kvg_kv_seq_add, seq=seq, p0=p0, p1=p1, delta=delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divides the positions of the sequence's cells in the range: pos becomes pos // d, where d >= 1.

        Shared cells are copied as in seq_add; raises what seq_add raises.
        """
        self._change(lib().kvg_kv_seq_div, seq=seq, p0=p0, p1=p1, d=d)

    def seq_pos_min(self, seq: int) -> int:
        """The lowest position from which on every group has the sequence's cells; -1 when it has none."""
        return self._known_bounds().pos_min[self._known_seq(seq)]

    def seq_pos_max(self, seq: int) -> int:
        """The sequence's highest position; -1 when it has no cells."""
        return self._known_bounds().pos_max[self._known_seq(seq)]

    def seq_bounds(self) -> SeqBounds:
        """The lowest and the highest position and the number of cells of every sequence, at one moment."""
        return SeqBounds(*map(np.array, self._handle.call(read_bounds, self._n_seq_max)))

    def seq_count(self, seq: int, p0: int, p1: int) -> SeqCount:
        """How many cells the sequence sees in the range, and how many of these are shared."""
        numbers = integer(seq, "seq"), integer(p0, "p0"), integer(p1, "p1")
        found = ctypes.c_int64(), ctypes.c_int64()
        self._handle.call(lib().kvg_kv_seq_count, *numbers, *(ctypes.byref(value) for value in found))
        return SeqCount(*(value.value for value in found))

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

    def resume_point(self, seq: int) -> ResumePoint:
        """Keeps what it takes to go on where the sequence ends, whatever becomes of it.

        That is the last positions of layers with a window, and the state of recurrent layers. Of these hold()
        keeps none; in a model of such layers alone a hold is its positions. To go on from a
        shared prefix, attach() its holds to an empty sequence, and then its resume point. It keeps as many
        cells as the window has positions; give the context
        `checkpoint_cells` for them, and `checkpoint_bytes` for states. Raises InvalidArgumentError when the
        sequence has no cells, CacheFullError when as many resume points keep states as there is room for.
        """
        return self._handle.call(self._holds.resume_point, integer(seq, "seq"))

    def checkpoint(self, seq: int) -> int:
        """Keeps what it takes to come back, with rewind(), to where the sequence ends; returns that position.

        Like a resume point, but it moves with the sequence (seq_add), and the cache drops it: when positions
        around its own are removed, or all before it; when seq_div or another token comes before it; when a
        move would bring into its window what the window has lost; and when a group needs the cells, or a
        decode or a load the room of its state.

        Then the one goes first, of all sequences, that is nearest to another of its sequence, or to position
        0; of equally near ones the one whose making, or whose last use by rewind() or seq_rm(), is longest
        ago. None goes for what would find no room even without all of them. Raises InvalidArgumentError when
        the sequence has no cells.
        """
        position = ctypes.c_int64()
        self._handle.call(lib().kvg_kv_checkpoint, integer(seq, "seq"), ctypes.byref(position))
        return position.value

    def checkpoints(self, seq: int) -> list[int]:
        """The positions of the sequence's checkpoints, in rising order."""
        return self._handle.call(read_checkpoints, integer(seq, "seq"))

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

    def pending_token(self, seq: int) -> int | None:
        """The token that generate() handed out for the sequence and that is not decoded yet, or None.

        The next generate() or LongReader decodes it first, behind the sequence's last position. save() and
        seq_cp() copy it, a context shift keeps it. seq_rm() and rewind() drop it when its position is in
        their range; clear(), reset(), load(), attach() and any other decode on the sequence drop it too.
        """
        return self._pending.get(self._known_seq(seq))

    def set_pending_token(self, seq: int, token: int | None) -> None:
        """Sets the sequence's pending token, or with None drops it."""
        self._pending.choose(self._known_seq(seq), token)

    def clear(self, data: bool = False) -> None:
        """Empties every cell, ends every hold, and zeroes K, V and states that were ever written.

        data: zeroes the K and V of all cells.
        """
        self._handle.call(lib().kvg_kv_clear, flag(data, "data"))
        self._pending.drop_all()

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

    @property
    def can_shift(self) -> bool:
        """Whether this model's K can be rotated to another position, or no layer has any."""
        return bool(self._info().can_shift)

    @property
    def n_cells(self) -> int:
        """Number of cells, empty or not, in the first group; `groups` has the numbers of each group."""
        return int(self._group(0).n_cells)

    @property
    def n_used(self) -> int:
        """Number of cells of the first group that are not empty."""
        return int(self._group(0).n_used)

    @property
    def n_free(self) -> int:
        """How many tokens can still be decoded: the number of empty cells in groups without a window.

        When every layer has a window, cells that are out of every sequence's window count too, and those that
        only checkpoints keep.
        """
        return int(self._info().n_free)

    @property
    def n_kv(self) -> int:
        """The index of the highest used cell of the first group + 1: `n_used` plus the number of holes."""
        return int(self._group(0).n_kv)

    @property
    def n_seq_max(self) -> int:
        """How many sequences there can be: their ids are 0 to n_seq_max - 1."""
        return int(self._info().n_seq_max)

    @property
    def n_attended(self) -> int:
        """How many cells of the first group the last graph of the last decode attended over, with holes."""
        return int(self._group(0).n_attended)

    @property
    def bytes(self) -> int:
        """Bytes of K and V on the devices, all groups together."""
        return int(self._info().bytes)

    @property
    def groups(self) -> tuple[CellGroup, ...]:
        """One CellGroup for each group of cells, and one more for recurrent states where layers have them."""
        groups = tuple(self._handle.call(read_cell_group, index) for index in range(self._n_groups))
        return groups + self._handle.call(read_state_groups)

    def cells(self, group: int = 0) -> CellsView:
        """A snapshot of all cells of one group; group: an index into `groups`.

        Of states, `pos` is the position of the last token that is in the row, and `held` says how many
        checkpoints and resume points keep it.
        """
        index = integer(group, "group", 0, self._n_groups - 1 + (self._info().n_states > 0))
        if index == self._n_groups:
            return self._handle.call(read_states)
        return self._handle.call(read_cells, index)

    def cell_map(self, seq: int | None = None) -> CellMap:
        """A picture of all cells at this moment: a notebook shows it in colours, print() as text.

        seq: the sequence whose attended span is marked. Raises InvalidArgumentError when it is out of range.
        """
        known = None if seq is None else self._known_seq(seq)
        return self._handle.call(_map, range(self._n_groups), range(self._n_seq_max), known)

    def read_k(self, layer: int) -> npt.NDArray[np.float32]:
        """A copy of one layer's K as float32 (n_cells, n_head_kv, head_dim), for inspection and tests.

        A pending K-shift runs first; a pending defrag doesn't, so cells keep their indices. The K of waiting
        cells (see update) is rotated in the copy only. K that was rotated more than once has dither in it,
        an error of up to about half a step of the type that K is stored in (docs/state-format.md).
        """
        return self._read(layer, 0)

    def read_v(self, layer: int) -> npt.NDArray[np.float32]:
        """A copy of one layer's V as float32 (n_cells, n_head_kv, head_dim). V never needs a shift."""
        return self._read(layer, 1)

    def read_rows(self, cells: Sequence[int], *, group: int = 0, layers: range | None = None) -> RawRows:
        """K and V of some cells, as the cache stores them.

        cells: indices of cells of the group. group: an index into `groups`. layers: indices into the group's
        `layers`; None: all of them. A pending K-shift runs first, as for save(). Raises InvalidArgumentError
        for an index that is out of range.
        """
        info = self._group(integer(group, "group", 0, self._n_groups - 1))
        layers = range(info.n_layer) if layers is None else indices(layers, "layers", info.n_layer)
        return self._handle.call(read_rows, group, layers, cells, info.k_row_bytes + info.v_row_bytes)

    def reserve(self, places: Sequence[Place]) -> Incoming:
        """Reserves empty cells, whose K and V the program then writes piece by piece (Incoming).

        places: one Place for each group of `groups`, in their order, all with the same positions. Raises,
        with nothing reserved: CacheFullError when a group has too few empty cells, InvalidArgumentError when
        positions are not strictly increasing, or differ between groups.
        """
        return Incoming(self._handle, places, self._pending)

    def save(self, seq: int | None = None) -> Blob:
        """The cells of one sequence, or with None the whole cache, as bytes (docs/state-format.md).

        All groups of cells and the checkpoints are in it. Holds are not, nor are their cells that no sequence
        sees. A pending K-shift runs first. The K of waiting cells (see update) is rotated in the bytes only,
        and so rounded once more there than in the cache. Raises InvalidArgumentError for an id out of range.
        """
        return self._handle.call(take, self._geometry, seq, self._pending)

    def load(self, blob: Blob | bytearray | memoryview, seq: int | None = None) -> None:
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
        try:
            data = memoryview(blob).cast("B")
        except (TypeError, ValueError):  # no buffer, or one with gaps
            raise InvalidArgumentError(f"the state must be bytes, got {shown(blob)}") from None
        self._load(unpack(data, self._geometry, self._room), seq)

    def __repr__(self) -> str:
        return repr_of(self, self._described)

    def _described(self) -> str:
        use = self._use()
        return use if use in ("closed", "busy") else f"{use}, {size_text(self.bytes)}"

    def _use(self) -> str:
        """How full the cache is, for people; doesn't wait for a decode."""
        if self._handle.closed:
            return "closed"
        if self._handle.busy:
            return "busy"
        groups, info = [self._group(index) for index in range(self._n_groups)], self._info()
        first, *others = [f"{group.n_used} of {group.n_cells}" for group in groups]
        windows = "".join(
            f", {use} in the window of {group.window}" for use, group in zip(others, groups[1:], strict=True)
        )
        states = f", {info.n_states_used} of {info.n_states} states" if info.n_states else ""
        return f"{first} cells used{windows}{states}"

    def _load(self, saved: SavedState, seq: int | None) -> None:
        if saved.whole != (seq is None):
            raise InvalidArgumentError(
                "this state holds a whole cache: load it without seq"
                if saved.whole
                else "this state holds one sequence: say which one it becomes, load(blob, seq=...)"
            )
        self._pending.check(saved.pending, seq, self._n_seq_max)
        self._handle.call(put, self._geometry, saved, seq)
        self._pending.load(saved.pending, seq)

    def save_file(self, path: str | os.PathLike[str], seq: int | None = None) -> None:
        """Writes what save(seq) returns into a file.

        The data goes into a temporary file first, which is synced to the disk and then renamed to `path`: at
        every moment `path` is the complete old file or the complete new one. An existing file keeps its
        permissions; a new one gets them from the umask (call `os.umask(0o077)` before to make it private).

        Raises what save() raises; InvalidArgumentError when `path` is a device, a pipe or a socket; OSError,
        which names the path, when the file can't be written.
        """
        name = os.fsdecode(native_path(path))
        write_file(name, self.save(seq))

    def load_file(self, path: str | os.PathLike[str], seq: int | None = None) -> None:
        """Loads a file that save_file() wrote, as load() does.

        Raises what load() raises; OSError when the file can't be read (FileNotFoundError when it is missing);
        StateError when `path` is a device or a pipe. K and V are read last: they are not read from a file
        that is no saved state, is cut short, or doesn't fit into the cache.
        """
        name = os.fsdecode(native_path(path))
        self._load(read_file(name, self._geometry, self._room), seq)

    @functools.cached_property
    def _room(self) -> tuple[int, ...]:
        """Cells of each group."""
        return tuple(self._group(index).n_cells for index in range(self._n_groups))

    @functools.cached_property
    def _n_seq_max(self) -> int:
        return int(self._info().n_seq_max)

    def _lost(self, group: int, seq: int) -> int:
        """The highest position that a group with a window has lost of a sequence; -1: none."""
        return int(self._handle.call(read_lost, group, self._n_seq_max)[seq])

    def _known_bounds(self) -> _KnownBounds:
        """The bounds of all sequences; read again only after another call on the context."""
        if self._bounds.n_calls != self._handle.n_calls:
            self._bounds = self._handle.call(self._ask_bounds, self._n_seq_max)
        return self._bounds

    def _ask_bounds(self, context: int, n_seq_max: int) -> _KnownBounds:
        pos_min, pos_max, _ = read_bounds(context, n_seq_max)
        return _KnownBounds(self._handle.n_calls, pos_min[:], pos_max[:])

    def _known_seq(self, seq: int) -> int:
        if type(seq) is int and 0 <= seq < self._n_seq_max:  # as nearly always
            return seq
        return integer(seq, "seq", 0, self._n_seq_max - 1)

    def _read(self, layer: int, v: int) -> npt.NDArray[np.float32]:
        layer = integer(layer, "layer", 0, self._info().n_layer - 1)
        # a layer without K and V of its own is in no group of cells: the library refuses it, and says why
        groups = self.groups[: self._n_groups]
        index = next((index for index, group in enumerate(groups) if layer in group.layers), 0)
        info = self._group(index)
        out = np.empty((info.n_cells, info.n_head_kv, info.head_dim_v if v else info.head_dim_k), np.float32)
        address = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._handle.call(lib().kvg_kv_read, layer, v, address, out.size)
        return out

    def _change(self, function: Any, **arguments: int) -> None:
        self._handle.call(function, *(integer(value, name) for name, value in arguments.items()))

    def _info(self) -> KvgKvInfo:
        return self._handle.call(read_info)

    @functools.cached_property
    def _n_groups(self) -> int:
        return int(self._info().n_groups)

    def _group(self, index: int) -> KvgGroupInfo:
        return self._handle.call(read_group, index)

    def _stats(self, function: Any) -> UpdateStats:
        stats = sized(KvgUpdateStats)
        self._handle.call(function, ctypes.byref(stats))
        return UpdateStats(**{name: getattr(stats, name) for name, *_ in stats._fields_[1:]})


renew_cached_properties_in_child(KVCache)


def _map(context: int, groups: range, seqs: range, seq: int | None) -> CellMap:
    return CellMap(
        tuple(read_cell_group(context, index) for index in groups),
        tuple(read_cells(context, index) for index in groups),
        read_states(context) if read_info(context).n_states else None,
        [read_checkpoints(context, each) for each in seqs],
        seq,
    )

"""The KV cache of a context: cells, and every operation on them."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import (
    KvgDefragPolicy,
    KvgGroupInfo,
    KvgGroupKind,
    KvgHold,
    KvgKvInfo,
    KvgUpdateStats,
)
from pykvgraph._native.fork import renew_cached_properties_in_child
from pykvgraph._native.handles import Handle, NotCopied
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import flag, integer, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.gguf_file import native_path
from pykvgraph.hold import Hold
from pykvgraph.incoming import Incoming, Place, RawRows, read_rows
from pykvgraph.state.cells import SavedState
from pykvgraph.state.file import read_file, write_file
from pykvgraph.state.format import unpack
from pykvgraph.state.geometry import Geometry
from pykvgraph.state.transfer import (
    put,
    read_bounds,
    read_cells,
    read_geometry,
    read_group,
    read_info,
    read_layers,
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
    """`context.kv`. A cell holds one token's K and V in every layer, its position, and who sees it.

    Ranges of positions are [p0, p1); p0 < 0 means 0, p1 < 0 means without end. Operations change cells only;
    K and V follow at the next `update()` or decode. But seq_add and seq_div copy the shared cells that move,
    at once; and save and read_k bring K to its positions first, as they tell. Any Python integer is safe:
    what can't be done raises InvalidArgumentError with nothing changed, and so does every call once the
    context is closed.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._bounds = _KnownBounds(-1, [], [])
        self._hold_struct = sized(KvgHold)
        self._hold_pointer = ctypes.byref(self._hold_struct)

    @functools.cached_property
    def _geometry(self) -> Geometry:
        return self._handle.call(read_geometry)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Sequence `seq` (below 0: every one) stops seeing the range.

        Cells that no sequence sees and no hold keeps become holes.
        """
        self._change(lib().kvg_kv_seq_rm, seq=seq, p0=p0, p1=p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """`dst` also sees the range of `src`; cells are shared, no data is copied."""
        self._change(lib().kvg_kv_seq_cp, src=src, dst=dst, p0=p0, p1=p1)

    def seq_keep(self, seq: int) -> None:
        """Every other sequence's sight is dropped."""
        self._change(lib().kvg_kv_seq_keep, seq=seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Positions in the range move by `delta`; a cell that would come below 0 is taken from the sequence.

        A shared cell that moves is copied at once, K and V too, and the other sharers keep theirs. Raises
        CacheFullError when there is no room for the copies. K of the other sharers may be rotated at the next
        update, where it waited (update).
        """
        self._change(lib().kvg_kv_seq_add, seq=seq, p0=p0, p1=p1, delta=delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Positions in the range become pos // d, d >= 1. Shared cells and errors as in seq_add."""
        self._change(lib().kvg_kv_seq_div, seq=seq, p0=p0, p1=p1, d=d)

    def seq_pos_min(self, seq: int) -> int:
        """The sequence's lowest position; -1 when it has no cells."""
        return self._known_bounds().pos_min[self._known_seq(seq)]

    def seq_pos_max(self, seq: int) -> int:
        """The sequence's highest position; -1 when it has no cells."""
        return self._known_bounds().pos_max[self._known_seq(seq)]

    def seq_bounds(self) -> SeqBounds:
        """Of every sequence, at one moment: lowest and highest position, and the number of its cells."""
        return SeqBounds(*map(np.array, self._handle.call(read_bounds, self._n_seq_max)))

    def seq_count(self, seq: int, p0: int, p1: int) -> SeqCount:
        """How many cells the sequence has in the range, and how many of them aren't its alone."""
        numbers = integer(seq, "seq"), integer(p0, "p0"), integer(p1, "p1")
        found = ctypes.c_int64(), ctypes.c_int64()
        self._handle.call(lib().kvg_kv_seq_count, *numbers, *(ctypes.byref(value) for value in found))
        return SeqCount(*(value.value for value in found))

    def hold(self, seq: int, p0: int, p1: int) -> Hold:
        """Keeps the sequence's cells in the range as they are, whatever becomes of the sequence.

        They stay in the cache when no sequence sees them any more, and attach() shows them to another one.
        seq_rm, seq_keep and load leave them; seq_add and seq_div copy them, as cells that somebody else sees;
        defrag moves them. Until `Hold.release()`, the last reference to the hold goes, or `clear()`.

        Raises InvalidArgumentError when the sequence lacks a position of the range, or the range is empty.
        """
        return self._handle.call(self._hold, integer(seq, "seq"), integer(p0, "p0"), integer(p1, "p1"))

    def attach(self, hold: Hold, seq: int) -> None:
        """The sequence sees the held cells too; nothing is copied, or decoded.

        A hold from position 0 goes to an empty sequence; further ones each begin where the sequence ends.
        Raises InvalidArgumentError for a hold that begins elsewhere, was released, or is another context's.
        """
        if not isinstance(hold, Hold) or hold._handle is not self._handle:
            raise InvalidArgumentError(f"hold must be what this cache's hold() gave, got {shown(hold)}")
        self._handle.call(lib().kvg_kv_attach, hold._id, integer(seq, "seq"))

    def clear(self, data: bool = False) -> None:
        """Every cell becomes empty, every hold is released, and K and V that were written are zeroed.

        With `data` all of K and V is zeroed.
        """
        self._handle.call(lib().kvg_kv_clear, flag(data, "data"))

    def defrag(self, policy: Literal["fill", "sort"] = "fill") -> None:
        """Asks for compaction at the next `update()` or decode.

        "fill": holes from the front take cells from the tail, in as few moves as there can be. "sort": one
        run of cells per distinct set of sequences, by position: larger sets first, then the lowest id; last,
        cells that only a hold keeps, in the order in which they lie.
        """
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise InvalidArgumentError(f'policy must be "fill" or "sort", got {shown(policy)}')
        self._handle.call(lib().kvg_kv_defrag, _POLICIES[policy])

    def update(self) -> UpdateStats:
        """Runs defrag, then the K-shift, as far as each is pending, and tells what was done.

        To rotate a quantized K rounds it again. So on the CPU most cells whose K-shift is pending wait
        (waiting_cells, `cells().shift`): their K stays as it is, and attention turns the queries the other
        way, which comes to the same. They may wait for ever. A cell waits where at least 64 cells have the
        same shift, on average 32 in 128 neighbouring cells; others are rotated.

        Cells of all sequences count. So an operation on one sequence (seq_rm, seq_add, seq_div, also where
        they copy shared cells) can leave too few cells of another one with the same shift: their K is then
        rotated, and rounded once.

        Raises DeviceError when the device fails, or has no memory for the graphs. What is not done is still
        pending then, and another call goes on. But a K-shift and a sort work in place: when one fails half
        way, K and V are lost, and whatever needs them is a DeviceError until `clear()` or `Context.reset()`.
        """
        return self._stats(lib().kvg_kv_update)

    def take_stats(self) -> UpdateStats:
        """What decode, read_k and save did by themselves, since the last call of this.

        Added up, but for waiting_cells, which are those after the last of them; 0 when there was none.
        """
        return self._stats(lib().kvg_kv_take_stats)

    @property
    def can_shift(self) -> bool:
        """Whether this model's K can be rotated to another position."""
        return bool(self._info().can_shift)

    @property
    def n_cells(self) -> int:
        """Capacity. This and the other counts are those of the first group; `groups` has each one's."""
        return int(self._group(0).n_cells)

    @property
    def n_used(self) -> int:
        """Cells that are not empty."""
        return int(self._group(0).n_used)

    @property
    def n_free(self) -> int:
        """Cells that are empty in every group: as many tokens can be decoded."""
        return int(self._info().n_free)

    @property
    def n_kv(self) -> int:
        """The highest used cell + 1; above `n_used` by the number of holes."""
        return int(self._group(0).n_kv)

    @property
    def n_seq_max(self) -> int:
        """Sequence ids are below this."""
        return int(self._info().n_seq_max)

    @property
    def n_attended(self) -> int:
        """Cells that the last decode's last graph looked at."""
        return int(self._group(0).n_attended)

    @property
    def bytes(self) -> int:
        """Size of K and V on the devices, all groups together."""
        return int(self._info().bytes)

    @property
    def groups(self) -> tuple[CellGroup, ...]:
        """One record for each group. Layers whose window and rows of K and V are alike share cells."""
        return tuple(self._handle.call(_cell_group, index) for index in range(self._n_groups))

    def cells(self, group: int = 0) -> CellsView:
        """A snapshot of every cell of a group."""
        return self._handle.call(read_cells, integer(group, "group", 0, self._n_groups - 1))

    def read_k(self, layer: int) -> npt.NDArray[np.float32]:
        """K of a layer, float32 (n_cells, n_head_kv, head_dim), for looking and testing.

        A pending K-shift runs first; K of cells that wait (update) is rotated in the copy. Cells stay
        where they are. What was rotated more than once carries dither, about half a rounding of the type
        (docs/state-format.md).
        """
        return self._read(layer, 0)

    def read_v(self, layer: int) -> npt.NDArray[np.float32]:
        """V of a layer, float32 (n_cells, n_head_kv, head_dim). Nothing needs to run first."""
        return self._read(layer, 1)

    def read_rows(self, cells: Sequence[int], *, group: int = 0, layers: range | None = None) -> RawRows:
        """Raw K and V of cells in some of a group's layers (by their places in it; None: all of them).

        A pending K-shift runs first, as for save().
        """
        info = self._group(integer(group, "group", 0, self._n_groups - 1))
        layers = range(info.n_layer) if layers is None else layers
        return self._handle.call(read_rows, group, layers, cells, info.k_row_bytes + info.v_row_bytes)

    def reserve(self, places: Sequence[Place]) -> Incoming:
        """Takes empty cells for rows that come in piece by piece: one Place for each group.

        Raises CacheFullError, with nothing taken, when a group has too few empty cells;
        InvalidArgumentError for positions that don't rise.
        """
        return Incoming(self._handle, places)

    def save(self, seq: int | None = None) -> Blob:
        """One sequence, or with None the whole cache, as bytes (docs/state-format.md).

        All groups of cells are in it. Held cells that no sequence sees are not, and holds neither.
        A pending K-shift runs first; K of cells that wait (update) is rotated in the copy, and rounded once
        more than the cells' own. Raises InvalidArgumentError for a sequence that can't be.
        """
        return self._handle.call(take, self._geometry, seq)

    def load(self, blob: Blob | bytearray | memoryview, seq: int | None = None) -> None:
        """Replaces sequence `seq`, or with None the whole cache, by what `save` gave; all or nothing.

        A sequence may come back under another id, and in any cells that are empty. Holds and their cells stay
        as they are; what is pending for other cells stays so. Raises StateError for a blob that is damaged,
        from another model or another kind of cache; CacheFullError when it doesn't fit; InvalidArgumentError
        when a sequence is loaded without an id, or a whole cache with one; DeviceError, and when that comes
        while K and V are written, they are lost as `update()` tells.
        """
        try:
            data = memoryview(blob).cast("B")
        except (TypeError, ValueError):  # no buffer, or one with gaps
            raise InvalidArgumentError(f"the state must be bytes, got {shown(blob)}") from None
        self._load(unpack(data, self._geometry, self._room), seq)

    def _load(self, saved: SavedState, seq: int | None) -> None:
        if saved.whole != (seq is None):
            raise InvalidArgumentError(
                "this state holds a whole cache: load it without seq"
                if saved.whole
                else "this state holds one sequence: say which one it becomes, load(blob, seq=...)"
            )
        self._handle.call(put, saved, seq)

    def save_file(self, path: str | os.PathLike[str], seq: int | None = None) -> None:
        """`save` into a file: written aside, synced and renamed, so that it is the old one or the new one.

        An existing file keeps its mode, a new one has the umask's: `os.umask(0o077)` before makes it private.
        Raises InvalidArgumentError for a device, pipe or socket, and as `save`; OSError, which names the
        path, when no file can be written there.
        """
        name = os.fsdecode(native_path(path))
        write_file(name, self.save(seq))

    def load_file(self, path: str | os.PathLike[str], seq: int | None = None) -> None:
        """`load` from a file, and raises as that; OSError for a missing one, StateError for a device or pipe.

        K and V are read last: not of what is no saved state, or not all of one, or doesn't fit.
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

    def _known_bounds(self) -> _KnownBounds:
        """Asked natively once after each call that may have changed them, not once for each sequence."""
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

    def _hold(self, context: int, seq: int, p0: int, p1: int) -> Hold:
        lib().kvg_kv_hold(context, seq, p0, p1, self._hold_pointer)
        held = self._hold_struct
        return Hold(self._handle, held.id, held.p0, held.p1)

    def _read(self, layer: int, v: int) -> npt.NDArray[np.float32]:
        layer = integer(layer, "layer", 0, self._info().n_layer - 1)
        index = next(index for index, group in enumerate(self.groups) if layer in group.layers)
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


def _cell_group(context: int, index: int) -> CellGroup:
    info = read_group(context, index)
    return CellGroup(
        kind="full" if info.kind == KvgGroupKind.KVG_GROUP_FULL else "window",
        layers=read_layers(context, index),
        n_cells=info.n_cells,
        window=info.window,
        n_used=info.n_used,
        n_kv=info.n_kv,
    )

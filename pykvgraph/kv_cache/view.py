"""What one can see of a cache: cells, sequences, sizes, K and V."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgGroupInfo, KvgGroupKind, KvgKvInfo
from pykvgraph._native.fork import importing, renew_cached_properties_in_child
from pykvgraph._native.handles import Handle, repr_of
from pykvgraph._native.kv import (
    read_bounds,
    read_cells,
    read_checkpoints,
    read_group,
    read_info,
    read_layers,
    read_lost,
    read_state_layers,
    read_states,
)
from pykvgraph._native.library import lib
from pykvgraph.checks import indices, integer, size_text
from pykvgraph.errors import NotCopied, UnsupportedError
from pykvgraph.kv_cache.pending_token import PendingTokens
from pykvgraph.types import CellGroup, CellsView, SeqBounds, SeqCount

if TYPE_CHECKING:
    from pykvgraph.kv_cache.maps.snapshot import CellMap
    from pykvgraph.kv_cache.reserved_cells import RawRows
    from pykvgraph.kv_cache.saved.geometry import Geometry


def read_cell_group(context: int, index: int) -> CellGroup:
    info = read_group(context, index)
    return CellGroup(
        kind="full" if info.kind == KvgGroupKind.KVG_GROUP_FULL else "window",
        layers=read_layers(context, index),
        n_cells=info.n_cells,
        window=info.window,
        n_used=info.n_used,
        n_kv=info.n_kv,
        cell_bytes=info.n_layer * (info.k_row_bytes + info.v_row_bytes),
        n_fresh=info.n_fresh,
        old_cell_bytes=info.n_layer * (info.old_k_row_bytes + info.old_v_row_bytes) if info.n_fresh else 0,
    )


def read_state_groups(context: int) -> tuple[CellGroup, ...]:
    """None, or one."""
    info = read_info(context)
    if info.n_states == 0:
        return ()
    used = np.flatnonzero(read_states(context).pos >= 0)
    n_kv = int(used[-1]) + 1 if len(used) else 0
    layers = read_state_layers(context)
    return (CellGroup("state", layers, info.n_states, 0, info.n_states_used, n_kv, info.state_bytes),)


_Bytes: TypeAlias = bytes  # ReadableCache has a method of that name


class DecodedUnder(NamedTuple):
    """Adapters that cells are decoded under, by their key, and whether some may have been under others."""

    key: bytes
    is_mixed: bool


class _KnownBounds(NamedTuple):
    """seq_pos_min and seq_pos_max of every sequence, after so many calls on the context."""

    n_calls: int
    pos_min: list[int]
    pos_max: list[int]


class ReadableCache(NotCopied):
    """A cache as far as one only looks at it; KVCache adds what changes it.

    No token, position or sequence is changed here; read_k and read_rows do the K-shift that is pending.
    """

    def __init__(self, handle: Handle, pending: PendingTokens) -> None:
        self._handle = handle
        self._pending = pending
        self._bounds = _KnownBounds(-1, [], [])
        self._under = DecodedUnder(b"", False)
        self._n_adapted = 0  # how often the adapters were changed

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

    def checkpoints(self, seq: int) -> list[int]:
        """The positions of the sequence's checkpoints, in rising order."""
        return self._handle.call(read_checkpoints, integer(seq, "seq"))

    def pending_token(self, seq: int) -> int | None:
        """The token that generate() handed out for the sequence and that is not decoded yet, or None.

        The next generate() or LongReader decodes it first, behind the sequence's last position. save() and
        seq_cp() copy it, a context shift keeps it. seq_rm() and rewind() drop it when its position is in
        their range; clear(), reset(), load(), attach() and any other decode on the sequence drop it too.
        """
        return self._pending.get(self._known_seq(seq))

    @property
    def can_shift(self) -> bool:
        """Whether this model's K can be rotated to another position, or no K has one.

        That is so with ALiBi, which asks cells for their positions, and in layers without attention.
        """
        return bool(self._info().can_shift)

    @property
    def ages(self) -> bool:
        """Whether K or V of old tokens goes to another type (`type_k="f16:q4_0@1024"`)."""
        return any(group.n_fresh for group in self.groups)

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
        """Bytes of K and V of all groups, and of recurrent states, on the devices and in host memory."""
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
        with importing:
            from pykvgraph.kv_cache.reserved_cells import read_rows
        return self._handle.call(read_rows, group, layers, cells, info.k_row_bytes + info.v_row_bytes)

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

    @functools.cached_property
    def _geometry(self) -> Geometry:
        with importing:
            from pykvgraph.kv_cache.saved.transfer import read_geometry
        return self._handle.call(read_geometry)

    def _decode_under(self, context: int, before: DecodedUnder, key: _Bytes) -> None:
        """From now on cells are decoded under these. For Handle.call() of the context."""
        info = read_info(context)
        is_empty = info.n_states_used == 0 and all(
            read_group(context, index).n_used == 0 for index in range(info.n_groups)
        )
        self._under = DecodedUnder(key, not is_empty and (before.is_mixed or key != before.key))
        self._n_adapted += 1

    def _forget_others(self) -> None:
        """The cache is empty: none of its cells was decoded under other adapters."""
        self._under = self._under._replace(is_mixed=False)

    @property
    def _saved_geometry(self) -> Geometry:
        """What cells fit that leave this cache or come into it: its own geometry, under its adapters."""
        if self._under.is_mixed:
            raise UnsupportedError(
                "some cells may have been decoded under other adapters than those that the context has now: "
                "clear() the cache before a state is saved, loaded or sent"
            )
        with importing:
            from pykvgraph.kv_cache.saved.geometry import under
        return under(self._geometry, self._under.key)

    @functools.cached_property
    def _n_groups(self) -> int:
        return int(self._info().n_groups)

    @functools.cached_property
    def _n_seq_max(self) -> int:
        return int(self._info().n_seq_max)

    @functools.cached_property
    def _room(self) -> tuple[int, ...]:
        """Cells of each group."""
        return tuple(self._group(index).n_cells for index in range(self._n_groups))

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

    def _info(self) -> KvgKvInfo:
        return self._handle.call(read_info)

    def _group(self, index: int) -> KvgGroupInfo:
        return self._handle.call(read_group, index)


renew_cached_properties_in_child(ReadableCache)


def _map(context: int, groups: range, seqs: range, seq: int | None) -> CellMap:
    with importing:
        from pykvgraph.kv_cache.maps.snapshot import CellMap
    return CellMap(
        tuple(read_cell_group(context, index) for index in groups),
        tuple(read_cells(context, index) for index in groups),
        read_states(context) if read_info(context).n_states else None,
        [read_checkpoints(context, each) for each in seqs],
        seq,
    )

"""Rows out of the cells: what a node of the index of prefixes holds, as a record."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pykvgraph.context.context import Context
from pykvgraph.errors import KVGraphError
from pykvgraph.kv_cache.saved.transfer import take_held
from pykvgraph.model.file_digest import file_digest
from pykvgraph.prefix import block
from pykvgraph.prefix.node import ALL, Node, Point
from pykvgraph.tiers.record import HEADER_BYTES, Name, Record, geometry_of, pack

if TYPE_CHECKING:
    from typing_extensions import Self

_TABLE_BYTES = 16  # of a cell in a saved state, beside its rows
_MOST_ROOTS = 1024  # keys that are remembered
_SECTIONS_BYTES = 8192  # of a saved state, beside rows; and 64 more for each layer


class Sink(Protocol):
    """Where records go: the store of an engine's tiers, or another engine's."""

    def save(self, name: Name, n_bytes: int, make: Callable[[], Record | None]) -> None:
        """Keeps what make() gives, unless it is there already. n_bytes: no more than so many."""


class Saver:
    """Puts into a sink what leaves the cells; the index calls it before it gives up nodes and points.

    Making one raises OSError when the model's file can't be read any more. has_points: texts go on from
    resume points only, so that the rest behind the last block is saved with one.
    """

    def __init__(self, ctx: Context, sink: Sink, has_points: bool) -> None:
        self.has_points = has_points
        self._kv = ctx.kv
        self._ctx = ctx
        self.sink = sink
        self._geometry = geometry = ctx.kv._geometry
        self._digest = file_digest(ctx.model)
        self._roots: dict[bytes, bytes] = {}
        self._cell_bytes = sum(group.cell_bytes for group in geometry.groups)
        self._window_bytes = sum(group.cell_bytes * group.window for group in geometry.groups)
        n_layers = sum(group.n_layer for group in geometry.groups)
        self._header_bytes = HEADER_BYTES + _SECTIONS_BYTES + 64 * n_layers

    @property
    def most_bytes(self) -> int:
        """Of a record, at most."""
        return self._n_bytes(block.N_TOKENS, has_point=True)

    def to(self, sink: Sink) -> Self:
        """One like it, for another sink."""
        other = copy.copy(self)
        other.sink = sink
        return other

    def root_key(self, salt: bytes) -> bytes:
        """The key of what texts under a salt begin with."""
        found = self._roots.get(salt)
        if found is None:
            if len(self._roots) >= _MOST_ROOTS:  # a request that wants nothing cached has a salt of its own
                self._roots.clear()
            found = self._roots[salt] = block.root_key(self._ctx, salt, self._digest)
        return found

    def node(self, node: Node) -> None:
        """A node of the index: a block, or the end of a text where no point is needed to go on."""
        if node.n_tokens == block.N_TOKENS:
            self._save(self._name(node, node.tokens, block.TOKENS), node, None)
        elif not self.has_points:
            self._save(self._name(node, node.tokens, block.END), node, None)

    def point(self, point: Point, node: Node) -> None:
        """A resume point, and the node that has the tokens before it."""
        self._save(self._name(node, point.run, block.END), node, point)

    def sequence(self, name: Name, seq: int) -> None:
        """All cells of a sequence, under a name that only such records have."""
        n = self._kv.seq_count(seq, -1, -1).n_cells
        n_bytes = self._n_bytes(n, has_point=False) + n * _TABLE_BYTES

        def make() -> Record | None:
            try:
                return pack(name, self._kv.save(seq))
            except (KVGraphError, MemoryError):
                return None

        self.sink.save(name, n_bytes, make)

    def _n_bytes(self, n_tokens: int, *, has_point: bool) -> int:
        """Of a record, at most."""
        of_point = self._window_bytes + self._geometry.state_bytes if has_point else 0
        return self._header_bytes + n_tokens * self._cell_bytes + of_point

    def _name(self, node: Node, tokens: bytes, kind: bytes) -> Name | None:
        """None: its cells are approximate, and nobody would know that of a record."""
        parent, root = node.parent, node.root
        assert parent is not None
        if root.n_exact < ALL and not root.made_of:  # of made ones EarlierText knows
            return None
        return Name(kind, parent.key(self.root_key(root.salt)), tokens, parent.end)

    def _save(self, name: Name | None, node: Node, point: Point | None) -> None:
        if name is None:
            return
        hold, resume = node.hold, point.resume if point else None
        assert hold is not None
        n_bytes = self._n_bytes(len(name.span), has_point=resume is not None)

        def make() -> Record | None:
            geometry, number = geometry_of(name.kind, self._geometry), resume._id if resume else None
            try:
                rows = self._kv._handle.call(take_held, geometry, hold._id, name.span, number)
            except (KVGraphError, MemoryError):
                return None
            return pack(name, rows)

        self.sink.save(name, n_bytes, make)

"""Prefixes that are kept for a time: which nodes of the index nobody evicts yet, and until when."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from time import monotonic as clock

from pykvgraph.prefix.node import Node


class TimedPins:
    """Nodes with the time until which they stay, n_most cells of them at most.

    A node's parent stays for at least as long, as pins are added from a root on. Nodes whose time has passed
    are pinned until expired() has told them.
    """

    def __init__(self, n_most: int) -> None:
        self.n_most = n_most
        self.n_cells = 0  # of all pinned nodes; any thread may read it
        self._nodes: set[Node] = set()
        self._heap: list[tuple[float, int, int, Node]] = []  # some entries are old

    @property
    def n_alone(self) -> int:
        """Cells of those with which no running text begins."""
        return sum(node.n_tokens for node in self._nodes if not node.n_pins)

    def now(self) -> float:
        """The time, in seconds, by which `until` is meant."""
        return clock()

    def fitting(self, path: Iterable[Node]) -> list[Node]:
        """Of nodes from a root's child on, the first ones that may be pinned: as far as there is room."""
        n, found = self.n_cells, list[Node]()
        for node in path:
            n += 0 if node in self._nodes else node.n_tokens
            if n > self.n_most:
                break
            found.append(node)
        return found

    def add(self, fitting: Iterable[Node], seconds: float) -> None:
        """Pins what fitting() has just returned. A node that is pinned for longer stays so."""
        until = self.now() + seconds
        for node in fitting:
            if node not in self._nodes:
                self.n_cells += node.n_tokens
                self._nodes.add(node)
            if until > node.until:
                node.until = until
                heapq.heappush(self._heap, (until, -node.end, id(node), node))

    def expired(self) -> list[Node]:
        """Nodes whose time has passed, which are not pinned any more."""
        found, now = [], self.now()
        while self._heap and self._heap[0][0] <= now:
            found += self._pop()
        return found

    def give_up(self) -> list[Node]:
        """The node whose time would pass first, which is not pinned any more; [] if there is none."""
        found: list[Node] = []
        while self._heap and not found:
            found = self._pop()
        return found

    def _pop(self) -> list[Node]:
        """The node of the first entry; of equal ones the deepest. [] if it is pinned for longer."""
        until, _, _, node = heapq.heappop(self._heap)
        if node.until != until:
            return []
        node.until = 0.0
        self._nodes.remove(node)
        self.n_cells -= node.n_tokens
        return [node]

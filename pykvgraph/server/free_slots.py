"""The slots that nobody has."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class FreeSlots:
    """A set of numbers whose least is known."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._slots = set(slots)
        self._heap = sorted(self._slots)  # one that was taken stays until it would be the least
        self._in_heap = set(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    @property
    def least(self) -> int:
        """The lowest number; -1: there is none."""
        while self._heap and self._heap[0] not in self._slots:
            self._in_heap.remove(heapq.heappop(self._heap))
        return self._heap[0] if self._heap else -1

    def add(self, slot: int) -> None:
        """It is free again."""
        self._slots.add(slot)
        if slot not in self._in_heap:
            self._in_heap.add(slot)
            heapq.heappush(self._heap, slot)

    def take(self, slot: int) -> None:
        """Somebody has it now. Raises KeyError when somebody had it."""
        self._slots.remove(slot)

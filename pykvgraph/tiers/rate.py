"""How long loading takes, as learned from what was loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# before anything was loaded: seconds of a record, and of a byte that is in memory or on a disk
_RECORD = 5e-4
_MEMORY_BYTE = 5e-10
_DISK_BYTE = 5e-9
_WEIGHT = 0.3  # of what was loaded last
_FADES = 0.99  # what was slow is tried again, some time


class Cost(NamedTuple):
    """Of a text's records. first: seconds as they were expected before anything was loaded."""

    first: float
    on_disk: bool


class LoadRate:
    """Seconds of loading, from memory and from the disk: the first guess times a factor that is learned."""

    def __init__(self) -> None:
        self._factors = [1.0, 1.0]

    def cost(self, sizes: Iterable[tuple[int, bool]]) -> Cost:
        """sizes: of each record its bytes, and whether it is on the disk."""
        first, any_on_disk = 0.0, False
        for n_bytes, on_disk in sizes:
            first += _RECORD + n_bytes * (_DISK_BYTE if on_disk else _MEMORY_BYTE)
            any_on_disk |= on_disk
        return Cost(first, any_on_disk)

    def seconds(self, cost: Cost) -> float:
        """As it is expected now."""
        return cost.first * self._factors[cost.on_disk]

    def learn(self, cost: Cost, seconds: float) -> None:
        """What it took."""
        factor = self._factors[cost.on_disk]
        self._factors[cost.on_disk] = factor + _WEIGHT * (seconds / cost.first - factor)

    def refuse(self, cost: Cost) -> None:
        """It was expected to take too long."""
        factor = self._factors[cost.on_disk]
        self._factors[cost.on_disk] = 1.0 + (factor - 1.0) * _FADES

"""Regions that have come and that nobody has fetched yet, within a number of bytes."""

from __future__ import annotations

from collections import deque

from pykvgraph.kv_cache.saved.device_rows import PackedRows

Region = bytes | bytearray | PackedRows

_OVERHEAD = 512  # bytes that an entry takes beside its region


class Arrived:
    """Those of one key are taken in the order in which they came."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.n_bytes = 0
        self._regions: dict[str, deque[Region]] = {}

    def has_room(self, n_bytes: int) -> bool:
        """Whether a region of that size can be added."""
        return self.n_bytes + n_bytes + _OVERHEAD <= self.limit

    def has(self, key: str) -> bool:
        """Whether take() would give one."""
        return key in self._regions

    def add(self, key: str, region: Region) -> None:
        self._regions.setdefault(key, deque()).append(region)
        self.n_bytes += len(region) + _OVERHEAD

    def take(self, key: str) -> Region | None:
        """The oldest region of a key; None: there is none."""
        regions = self._regions.get(key)
        if regions is None:
            return None
        region = regions.popleft()
        if not regions:
            del self._regions[key]
        self.n_bytes -= len(region) + _OVERHEAD
        return region

"""Records in memory, within a number of bytes; those that were used longest ago go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pykvgraph.tiers.record import Record


class _Kept:
    """A record, and how many threads use it now: meanwhile it stays."""

    __slots__ = ("n_users", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.n_users = 0


class MemoryTier:
    """The tier in memory: records by key.

    Bytes are counted before they are taken: reserve(), then put() or give_back().

    n_bytes: of all records, and of what is reserved; never above `limit`. gone: is told the key of each
    record that has made way. Not for several threads at once: the store has a lock.
    """

    def __init__(self, limit: int, gone: Callable[[bytes], None]) -> None:
        self.limit = limit
        self.n_bytes = 0
        self._gone = gone
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # the first was used longest ago

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def n_bytes_of(self, key: bytes) -> int:
        """Of a record that is there."""
        return self._kept[key].record.n_bytes

    def reserve(self, n_bytes: int) -> bool:
        """Counts bytes that are to come; False, with nothing changed, when others can't make way for them."""
        missing = self.n_bytes + n_bytes - self.limit
        if n_bytes > self.limit:
            return False
        going = []
        for key, kept in self._kept.items() if missing > 0 else ():
            if missing <= 0:
                break
            if not kept.n_users:
                going.append(key)
                missing -= kept.record.n_bytes
        if missing > 0:
            return False
        for key in going:
            self._remove(key)
            self._gone(key)
        self.n_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        """What reserve() counted, and nobody takes."""
        self.n_bytes -= n_bytes

    def put(self, key: bytes, record: Record, reserved: int) -> None:
        """Keeps a record in what reserve() counted for it. precondition: it fits, and the key is new."""
        self.n_bytes -= reserved - record.n_bytes
        self._kept[key] = _Kept(record)

    def use(self, key: bytes) -> Record | None:
        """The record, which stays until release(); None: it has gone."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        kept.n_users += 1
        self._kept.move_to_end(key)
        return kept.record

    def release(self, key: bytes) -> None:
        """One user less."""
        self._kept[key].n_users -= 1

    def touch(self, key: bytes) -> None:
        """It was used now."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def drop(self, key: bytes) -> None:
        """Forgets it, unless it is in use."""
        kept = self._kept.get(key)
        if kept is not None and not kept.n_users:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        self.n_bytes -= self._kept.pop(key).record.n_bytes

"""Two ends in one process, for threads: a region is copied once if its fetch waits already, else twice.

Nothing leaves the process, so there are no checksums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pykvgraph.kv_cache.saved.device_rows import PackedRows
from pykvgraph.stream.transports.arrived import Arrived
from pykvgraph.stream.transports.transport import Transport


@dataclass(eq=False)
class _Wanted:
    """A fetch that waits. came: the size of its region, as soon as that is there."""

    key: str
    into: memoryview
    came: int | None = None


class _Way:
    """What travels in one direction."""

    def __init__(self, limit: int) -> None:
        self.arrived = Arrived(limit)
        self.wanted: _Wanted | None = None
        self.rows_wanted: str | None = None  # a key that a fetch of packed rows waits for
        self.sender_closed = False
        self.receiver_closed = False

    def wants(self, key: str) -> _Wanted | None:
        wanted = self.wanted
        return wanted if wanted is not None and wanted.key == key and wanted.came is None else None


class MemoryTransport(Transport):
    """One end of a pair in this process: the first and the second that open the same name."""

    def __init__(self, address: str, timeout: float, queue_bytes: int) -> None:
        super().__init__(address, timeout)
        with _opening:
            first = _alone.pop(address, None)
            if first is None:
                self._changed = threading.Condition()
                self._out, self._in = _Way(queue_bytes), _Way(queue_bytes)
                _alone[address] = self
            else:
                self._changed = first._changed
                self._out, self._in = first._in, first._out

    def _send(self, key: str, data: memoryview) -> None:
        way = self._out
        with self._changed:
            self._wait(
                lambda: way.receiver_closed or bool(way.wants(key)) or way.arrived.has_room(data.nbytes),
                f"nobody has fetched region {key!r} for {self.timeout:g} s",
            )
            if way.receiver_closed:
                raise self._error("the other end is closed", "open both anew")
            wanted = way.wants(key)
            if wanted is None:
                way.arrived.add(key, bytes(data))
                return
            wanted.came = data.nbytes
            if wanted.came == wanted.into.nbytes:
                wanted.into[:] = data
            self._changed.notify_all()

    def _receive(self, key: str, into: memoryview) -> None:
        way = self._in
        with self._changed:
            region = way.arrived.take(key)
            if region is None:
                n_bytes = self._wait_for_region(key, into)
            else:
                n_bytes = len(region)
                self._changed.notify_all()
        if n_bytes != into.nbytes:
            raise self._other_size(key, n_bytes, into.nbytes)
        if isinstance(region, PackedRows):
            raise self._error(f"region {key!r} has packed rows, no bytes", "open both anew")
        if region is not None:
            into[:] = region

    def _wait_for_region(self, key: str, into: memoryview) -> int:
        """Its size, when it has come."""
        way = self._in
        way.wanted = wanted = _Wanted(key, into)
        self._changed.notify_all()
        try:
            self._wait(
                lambda: wanted.came is not None or way.sender_closed,
                f"region {key!r} has not come for {self.timeout:g} s",
            )
        finally:
            way.wanted = None
        if wanted.came is None:
            raise self._error(f"the other end is closed, and region {key!r} has not come", "open both anew")
        return wanted.came

    def _wait(self, ready: Callable[[], bool], else_said: str) -> None:
        """Until ready(), or until this end is closed. Raises TransportError."""
        if not self._changed.wait_for(lambda: ready() or self._ended is not None, self.timeout):
            raise self._stalled(else_said)
        if not ready():
            raise self._error(self._ended or "", "open both anew")

    def _shut(self) -> None:
        with _opening:
            if _alone.get(self.address) is self:
                del _alone[self.address]
        with self._changed:
            self._out.sender_closed = self._in.receiver_closed = True
            self._in.arrived = Arrived(self._in.arrived.limit)  # nobody fetches what is there
            self._changed.notify_all()


_opening = threading.Lock()
_alone: dict[str, MemoryTransport] = {}  # first ends whose second ones are not open yet

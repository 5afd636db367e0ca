"""Regions as frames, over whatever carries bytes in their order."""

from __future__ import annotations

from abc import abstractmethod

from pykvgraph.stream.arrived import Arrived
from pykvgraph.stream.frame import HEAD_BYTES, FrameError, Head, check_part, frames, read_head
from pykvgraph.stream.transport import Transport


class Framed(Transport):
    """A thread that fetches is the one that reads: what nobody asks for stays with the sender.

    On its way to the region that was asked for it keeps those of other keys, within the queue's bytes.
    """

    def __init__(self, address: str, timeout: float, queue_bytes: int) -> None:
        super().__init__(address, timeout)
        self._arrived = Arrived(queue_bytes)
        self._head = bytearray(HEAD_BYTES)

    @abstractmethod
    def _write(self, head: bytes, part: memoryview) -> None:
        """A frame. Raises TransportError, also when the other end takes nothing for `timeout` seconds."""

    @abstractmethod
    def _read(self, into: memoryview, what: str) -> None:
        """All of these bytes, within `timeout` seconds. what: for the message. Raises TransportError."""

    def _send(self, key: str, data: memoryview) -> None:
        for head, part in frames(key, data):
            self._write(head, part)

    def _receive(self, key: str, into: memoryview) -> None:
        region = self._arrived.take(key)
        if region is not None:
            if len(region) != into.nbytes:
                raise self._other_size(key, len(region), into.nbytes)
            into[:] = region
            return
        try:
            while not self._read_region(key, into):
                pass
        except FrameError as error:
            raise self._error(
                str(error), "see what the other end is, and that its version is the same"
            ) from None

    def _read_region(self, key: str, into: memoryview) -> bool:
        """The next region, whatever its key; True: it was this one."""
        first = self._read_head(f"region {key!r} has not come")
        if first.begin != 0:
            raise FrameError(f"a region came that begins at byte {first.begin}")
        if first.key == key:
            if first.n_bytes != into.nbytes:
                raise self._other_size(key, first.n_bytes, into.nbytes)
            self._read_parts(first, into)
            return True
        if not self._arrived.has_room(first.n_bytes):
            raise self._error(
                f"region {first.key!r} came before {key!r}, and {self._arrived.n_bytes} of"
                f" {self._arrived.limit} bytes are taken by others, so its {first.n_bytes} have no room",
                "fetch in the order of flushing, or open this end with larger queue_bytes",
            )
        other = bytearray(first.n_bytes)
        self._read_parts(first, memoryview(other))
        self._arrived.add(first.key, other)
        return False

    def _read_parts(self, head: Head, into: memoryview) -> None:
        """The rest of a region, from the first part on."""
        what = f"region {head.key!r} came in part only"
        while True:
            part = into[head.begin : head.end]
            self._read(part, what)
            check_part(self._head, part)
            if head.end == head.n_bytes:
                return
            expected = Head(head.key, head.n_bytes, head.end)
            head = self._read_head(what)
            if head != expected:
                raise FrameError(f"of region {expected.key!r} another part came than byte {expected.begin}")

    def _read_head(self, what: str) -> Head:
        self._read(memoryview(self._head), what)
        return read_head(self._head)

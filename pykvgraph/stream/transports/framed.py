"""Regions as frames, over whatever carries bytes in their order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from pykvgraph.errors import TransportError
from pykvgraph.kv_cache.saved.device_rows import PackedRows
from pykvgraph.stream.transports.arrived import Arrived
from pykvgraph.stream.transports.frame import FrameError, FrameHeader, frames, read_region
from pykvgraph.stream.transports.pieces import Pieces, gathered
from pykvgraph.stream.transports.transport import Transport


class FramedTransport(Transport):
    """One end that sends regions as frames, over whatever carries bytes in their order.

    A thread that fetches is the one that reads: what nobody asks for stays with the sender.

    On its way to the region that was asked for it keeps those of other keys, within the queue's bytes.
    """

    def __init__(self, address: str, timeout: float, queue_bytes: int) -> None:
        super().__init__(address, timeout)
        self._arrived = Arrived(queue_bytes)

    @abstractmethod
    def _write(self, pieces: Pieces) -> None:
        """Headers and parts of frames, in turn.

        Raises TransportError, also when the other end takes nothing for `timeout` seconds.
        """

    @abstractmethod
    def _read(self, into: memoryview, what: str) -> None:
        """All of these bytes, within `timeout` seconds. what: for the message. Raises TransportError."""

    def _send(self, key: str, data: memoryview) -> None:
        self._send_all([(key, data)])

    def _send_all(self, regions: Sequence[tuple[str, memoryview]]) -> None:
        framed = (piece for key, data in regions for frame in frames(key, data) for piece in frame)
        for pieces in gathered(framed):
            self._write(pieces)

    def _receive(self, key: str, into: memoryview) -> None:
        region = self._arrived.take(key)
        if region is not None:
            assert not isinstance(region, PackedRows)  # of `device` alone
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
        kept = bytearray()

        def place(header: FrameHeader) -> memoryview:
            nonlocal kept
            if header.key == key:
                if header.n_bytes != into.nbytes:
                    raise self._other_size(key, header.n_bytes, into.nbytes)
                return into
            if not self._arrived.has_room(header.n_bytes):
                raise self._no_room(header, key)
            kept = bytearray(header.n_bytes)
            return memoryview(kept)

        came = read_region(self._read, f"region {key!r} has not come", place)
        if came.key == key:
            return True
        self._arrived.add(came.key, kept)
        return False

    def _no_room(self, header: FrameHeader, key: str) -> TransportError:
        taken = f"{self._arrived.n_bytes} of {self._arrived.limit} bytes are taken by others"
        what = f"region {header.key!r} came before {key!r}; {taken}, so its {header.n_bytes} have no room"
        return self._error(what, "fetch in the order of flushing, or open this end with more queue_bytes")

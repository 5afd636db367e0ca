"""The other end of peers: what they send gets into this engine's tier in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.opening import listen
from pykvgraph.stream.transports.transport import Transport
from pykvgraph.tiers.peer import ANSWER, SIZES
from pykvgraph.tiers.record import FIXED_BYTES, HEADER_BYTES, Record, read_header

_log = logging.getLogger("pykvgraph")
# A worker may have nothing to send for long. Were the connection closed meanwhile, the next record would be
# lost, which is the beginning of a prompt. Who has ended closes it.
IDLE_SECONDS = 86_400.0
_PAUSE = 1.0  # seconds, after which it listens again


class PeerReceiver:
    """Takes the records of whoever connects and knows the token, each in a thread of its own.

    address: to listen at. most: bytes of a record's rows. take: gets each record, unchecked but for its
    header; from any thread. Raises TransportError when nobody can listen there.
    """

    def __init__(self, address: str, token: str, most: int, take: Callable[[Record], None]) -> None:
        self._listener = listen(address, token, timeout=IDLE_SECONDS)
        self._most = most
        self._take = take
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="pykvgraph peer receiver", daemon=True).start()

    @property
    def address(self) -> str:
        """Where peers find it."""
        return self._listener.address

    def close(self) -> None:
        """Takes nothing from others who come."""
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                transport = self._listener.accept()
                threading.Thread(target=self._receive, args=(transport,), daemon=True).start()
            except Exception as error:  # nobody came for a day, or there are too many files or threads
                _log.debug("no worker's copies are taken now: %s", error)
                self._closed.wait(_PAUSE)

    def _receive(self, transport: Transport) -> None:
        with transport:
            try:
                receive(transport, self._most, self._take)
            except TransportError as error:
                _log.debug("a worker sends no more copies: %s", error)


def receive(transport: Transport, most: int, take: Callable[[Record], None]) -> None:
    """Takes what a Peer sends, until its end. most: bytes of a record's rows.

    Raises TransportError when the other end goes away, or sends something else.
    """
    sizes = bytearray(SIZES.size)
    while True:
        transport.fetch("head", sizes)
        n_header, n_rows = SIZES.unpack(sizes)
        if not n_header:
            transport.flush("answer", ANSWER)
            continue
        if not FIXED_BYTES < n_header <= HEADER_BYTES or n_rows > most:
            raise TransportError(f"{transport.address}: no record has {n_header} and {n_rows} bytes")
        header, rows = bytearray(n_header), bytearray(n_rows)
        transport.fetch("front", header)
        transport.fetch("rows", rows)
        record = Record(bytes(header), memoryview(rows))
        if read_header(record.header) is None:
            raise TransportError(f"{transport.address}: what came is no record")
        take(record)

"""The memory tier of another engine: what is saved here goes there, over a transport."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from pykvgraph.stream.transports.transport import Transport
from pykvgraph.tiers.record import Name, Record

_log = logging.getLogger("pykvgraph")
MOST_BYTES = 256 << 20  # of records that wait to be sent; what comes beyond them is left out
_SENT_SECONDS = 60.0  # in which a record is not sent twice; later the other end may have dropped it
_MOST_SENT = 1 << 16  # keys that are remembered
_QUIET_SECONDS = 60.0  # between two warnings
# of each record: bytes of its header and of its rows. A header of 0 bytes is a question, which the other end
# answers when it has taken all earlier records
SIZES = struct.Struct("<QQ")
ANSWER = b"\1"


class Peer:
    """Sends records from a thread of its own; save() never waits. For several threads.

    connect: opens the transport, when there is something to send, and anew after it has failed. Records are
    only copies: what can't be sent is left out, and whoever lacks it decodes it.
    """

    def __init__(self, connect: Callable[[], Transport]) -> None:
        self.n_left_out = 0
        self.used = time.monotonic()  # when somebody last wanted something of it
        self._connect = connect
        self._news = threading.Condition()
        self._queue: deque[tuple[bytes, Record]] = deque()
        self._n_bytes = 0  # that wait
        self._sent: OrderedDict[bytes, float] = OrderedDict()  # by key: when; the oldest first
        self._n_asked = self._n_answered = 0  # questions of flush()
        self._is_closed = False
        self._quiet_until = 0.0
        self._transport: Transport | None = None
        threading.Thread(target=self._run, name="pykvgraph peer", daemon=True).start()

    def save(self, name: Name, n_bytes: int, make: Callable[[], Record | None]) -> None:
        """Has what make() gives sent, unless it was a moment ago. n_bytes: no more than so many."""
        key, now = name.key, time.monotonic()
        self.used = now
        with self._news:
            if self._is_closed or now - self._sent.get(key, -_SENT_SECONDS) < _SENT_SECONDS:
                return
            if self._n_bytes + n_bytes > MOST_BYTES:
                self.n_left_out += 1
                return
        record = make()
        if record is None:
            return
        with self._news:
            self._queue.append((key, record))
            self._n_bytes += record.n_bytes
            self._sent[key] = now
            self._sent.move_to_end(key)
            if len(self._sent) > _MOST_SENT:
                self._sent.popitem(last=False)
            self._news.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until the other end has taken what was queued; False: not all of that, or not in time.

        What was left out before, for lack of room or with a connection that broke, doesn't count.
        """
        with self._news:
            n_left_out = self.n_left_out
            self._n_asked += 1
            wanted = self._n_asked
            self._queue.append((b"", Record(b"", b"")))
            self._news.notify_all()
            self._news.wait_for(lambda: self._n_answered >= wanted or self._is_closed, seconds)
            return self._n_answered >= wanted and self.n_left_out == n_left_out

    def close(self) -> None:
        """What waits is dropped. The thread ends by itself: it may be about to connect."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
            transport = self._transport
        if transport is not None:
            transport.close()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                key, record = self._queue.popleft()
                self._n_bytes -= record.n_bytes
            try:
                self._send(record)
            except Exception as error:  # whatever it is, the next record is tried anew
                self._lose(key, error)
            if not key:
                with self._news:
                    self._n_answered += 1
                    self._news.notify_all()

    def _send(self, record: Record) -> None:
        if self._transport is None:
            transport = self._connect()
            with self._news:
                self._transport = transport
                is_closed = self._is_closed
            if is_closed:
                transport.close()
        else:
            transport = self._transport
        transport.flush("head", SIZES.pack(len(record.header), len(record.rows)))
        if not record.header:
            transport.fetch("answer", bytearray(len(ANSWER)))
            return
        transport.flush("front", record.header)
        transport.flush("rows", record.rows)

    def _lose(self, key: bytes, error: Exception) -> None:
        """Nobody can tell what the other end has; the next record is sent over a new transport."""
        with self._news:
            if self._transport is not None:
                self._transport.close()
            self._transport = None
            self._sent.clear()
            self.n_left_out += 1
            is_quiet = self._is_closed or time.monotonic() < self._quiet_until
            if not is_quiet:
                self._quiet_until = time.monotonic() + _QUIET_SECONDS
        if not is_quiet:
            _log.warning("copies of texts can't be sent to another worker: %s", error)

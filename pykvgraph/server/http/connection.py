"""uvicorn's connections, with limits: how many there are, how long one is idle, how long a head is.

A client that has sent its whole request may close its side, and gets its answer all the same.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pykvgraph.openai.errors import invalid
from pykvgraph.openai.wire_json import JSON_TYPE, dumps
from pykvgraph.server.http.half_closed import HalfClosed
from pykvgraph.server.http.header_names import capitalize_names

_LONGEST_HEAD = 1 << 16  # bytes
# requests that wait for their turn on a connection, and parts of a body beside one for every 16 bytes: each
# part and each head that is read takes a while, 256 KiB of them a fifth of a second of everybody's time
_MOST_WAITING = 64
_MOST_PARTS, _LEAST_PART = 4096, 16
# an answer that every client of HTTP/1.1 passes over: only who is there takes it without a reset
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BAD_HEAD = b"HTTP/1.1 400 Bad Request\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


def limited(most: int, idle_seconds: float) -> type[asyncio.Protocol]:
    """The protocol of a server with `most` connections at most: one more closes the one idle longest."""
    idle: OrderedDict[int, Connection] = OrderedDict()  # by id()
    opened: set[int] = set()
    half_closed = HalfClosed()

    class Connection(HttpToolsProtocol):
        """Closed when it has been idle for idle_seconds: no whole head of a request has come."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._n_head = 0
            self._in_head = False
            self._watched: int | None = None
            opened.add(id(self))
            idle[id(self)] = self
            self._wait_for_head()
            if len(opened) > most:
                next(iter(idle.values())).transport.close()

        def connection_lost(self, error: Exception | None) -> None:
            opened.discard(id(self))
            idle.pop(id(self), None)
            self._patience.cancel()
            if self._watched is not None:
                half_closed.forget(self._watched)
            super().connection_lost(error)

        def eof_received(self) -> bool:  # type: ignore[override]
            """Whether the connection stays open."""
            if self._in_head or not self._is_busy() or self.cycle.more_body:
                return False
            is_silent = not self.cycle.response_started
            if is_silent and self.scope["http_version"] == "1.0":  # which has no probe
                return False
            self.cycle.keep_alive = False
            if self._watched is None:
                try:
                    self._watched = half_closed.watch(self.transport, self.loop)
                except OSError:
                    return False
            if is_silent and not self.pipeline:
                self.transport.write(_PROBE)
            return True

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._in_head:
                self._n_head += len(data)
                if self._n_head > _LONGEST_HEAD:
                    self.transport.close()

        def send_400_response(self, msg: str) -> None:
            body = dumps(invalid(msg).body())
            self.transport.write(_BAD_HEAD % (JSON_TYPE, len(body)) + body)
            self.transport.close()

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= _MOST_WAITING:
                raise ValueError("too many requests at once")
            super().on_message_begin()
            self._n_head = self._n_parts = self._n_body = 0
            self._in_head = True

        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            capitalize_names(self.cycle)
            self._in_head = False
            idle.pop(id(self), None)
            self._patience.cancel()

        def on_body(self, body: bytes) -> None:
            """Whatever these callbacks raise is a 400, and closes the connection."""
            self._n_parts += 1
            self._n_body += len(body)
            if self._n_parts > _MOST_PARTS + self._n_body // _LEAST_PART:
                raise ValueError("the parts of the body are too small")
            super().on_body(body)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._is_busy():
                idle[id(self)] = self
                self._wait_for_head()

        def _is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait_for_head(self) -> None:
            self._patience = self.loop.call_later(idle_seconds, self.transport.close)

    return Connection

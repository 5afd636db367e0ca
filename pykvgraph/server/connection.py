"""A connection of uvicorn's with limits: how many there are, how long one may say nothing, how long a head is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_LONGEST_HEAD = 1 << 16  # bytes


def limited(most: int, idle_seconds: float) -> type[asyncio.Protocol]:
    """The protocol of a server that has at most so many connections; who is idle longest goes first."""

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Closed when no whole head of a request has come for idle_seconds, or in idle_seconds twice."""

        _idle: OrderedDict[int, Connection] = OrderedDict()  # by id()
        _n_open = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            Connection._n_open += 1
            self._n_head = 0
            self._idle[id(self)] = self
            self._patience = self.loop.call_later(idle_seconds, self._close_if_idle)
            if Connection._n_open > most:
                next(iter(self._idle.values())).transport.close()

        def connection_lost(self, error: Exception | None) -> None:
            Connection._n_open -= 1
            self._idle.pop(id(self), None)
            self._patience.cancel()
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_idle():
                self._n_head += len(data)
                if self._n_head > _LONGEST_HEAD:
                    self.transport.close()
            else:
                self._n_head = 0
                self._idle.pop(id(self), None)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._is_idle():
                self._idle[id(self)] = self

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _close_if_idle(self) -> None:
            if self._is_idle():
                self.transport.close()
            else:
                self._patience = self.loop.call_later(idle_seconds, self._close_if_idle)

    return Connection

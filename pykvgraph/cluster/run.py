"""The life of a server with workers: it starts them, answers as they do, and ends them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import httpx

from pykvgraph.cluster.front import Front, front_app
from pykvgraph.cluster.workers import Workers
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.run import HttpServer
from pykvgraph.server.settings import Settings


class ClusterServer(HttpServer):
    """Serves n engines, each in a process of its own: run(sockets=[listener]), and stop().

    on_ready: is told when all of them have been ready. run() raises KVGraphError when a worker ends before
    any was ready.
    """

    def __init__(
        self, settings: Settings, engine: EngineSpec, n: int, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self._front = Front(settings, n)
        self._awaited = set(range(n))
        self._on_ready = on_ready
        self._workers = Workers(settings, engine, n, self._up, self._front.down)
        super().__init__(settings, front_app(self._front))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by run()."""
        keeping = asyncio.ensure_future(self._workers.run())
        keeping.add_done_callback(self._end)
        try:
            await super().serve(sockets)
        finally:
            self._workers.stop()
            await asyncio.wait({keeping})
        keeping.result()

    def _up(self, number: int, client: httpx.AsyncClient) -> None:
        self._front.up(number, client)
        if self._awaited:
            self._awaited.discard(number)
            if not self._awaited:
                self._on_ready()

    def _end(self, _: asyncio.Future[None]) -> None:
        self.should_exit = True

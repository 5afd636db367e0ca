"""The life of a server with workers: it starts them, answers as they do, and ends them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

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
        front = Front(settings, n, on_ready)
        self._workers = Workers(front, engine, n)
        super().__init__(settings, front_app(front))

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

    def _end(self, _: asyncio.Future[None]) -> None:
        self.should_exit = True

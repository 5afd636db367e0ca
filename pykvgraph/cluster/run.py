"""The life of a server with workers: it starts them, answers as they do, and ends them."""

from __future__ import annotations

import asyncio
import socket

from pykvgraph.cluster.front import front_app
from pykvgraph.cluster.pool import Pool
from pykvgraph.cluster.supervisor import Supervisor
from pykvgraph.server.run import HttpServer

_END_SECONDS = 30.0  # that workers have until they are killed, when a server ends


class ClusterServer(HttpServer):
    """Serves the workers of a pool: run(sockets=[listener]), and stop().

    run() raises KVGraphError when a worker ends before any was ready.
    """

    def __init__(self, pool: Pool, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        super().__init__(pool.settings, front_app(pool))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by run()."""
        keeping = asyncio.ensure_future(self._supervisor.run())
        keeping.add_done_callback(self._end)
        with self.capture_signals():  # to the very end: super().serve() lets go of them before that
            try:
                await super().serve(sockets)
            finally:
                self._supervisor.stop()  # nobody is answered any more
                if not (await asyncio.wait({keeping}, timeout=_END_SECONDS))[0]:
                    self._supervisor.stop()
                    await asyncio.wait({keeping})
        keeping.result()

    def _end(self, _: asyncio.Future[None]) -> None:
        self.should_exit = True

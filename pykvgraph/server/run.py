"""The server's life: it listens while the model is loaded, answers, and drains when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pykvgraph.engine import Engine
from pykvgraph.server.app import application
from pykvgraph.server.http.connection import limited
from pykvgraph.server.service import Service
from pykvgraph.server.settings import Settings

_log = logging.getLogger("pykvgraph.server")
_BACKLOG = 2048
_LAST_SECONDS = 5.0  # for requests of connections that were closed
_ORDERED_SECONDS = 1.0  # that the second signal leaves for an end in order
_SIGNALS = signal.SIGINT, signal.SIGTERM
# For which a thread keeps the interpreter while others wait. A step of the engine takes it again behind each
# of hundreds of native calls: with Python's own 5 ms, threads that read bodies made tokens wait for seconds.
_SWITCH_SECONDS = 1e-4
# Nobody runs while Python's collector looks at the containers that there are. By itself it looks when there
# are many new ones: at a body of a million arrays, in a thread of low priority, for seconds. So it looks only
# once in so many seconds, when no such body is there.
_COLLECT_SECONDS = 5.0
# Of memory that glibc takes from the system for itself alone, and returns when it is freed. Without a limit
# the size grows with what is freed, to 32 MiB: long bodies left half a gigabyte of holes in the heap.
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 2 << 20


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket that listens. port 0: any that is free. reuse_port: others may, too. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)


def address_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves an application: run(sockets=[listener]), and stop() from another thread.

    SIGTERM and SIGINT let those finish who are being answered, and let nobody else in; a second one ends
    them, too, and a second later the process, whatever it is in.
    """

    def __init__(self, settings: Settings, app: ASGIApp) -> None:
        config: dict[str, Any] = {
            "http": limited(settings.max_connections, settings.idle_seconds),
            "ws": "none",
            "lifespan": "off",
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "date_header": False,
            "timeout_keep_alive": max(min(int(settings.idle_seconds), 75), 1),
        }
        super().__init__(uvicorn.Config(app, **config))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by serve(), to wait for those who are being answered; after a second signal nobody is."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_SECONDS)

    def stop(self) -> None:
        """As a signal does; from any thread."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for a signal."""
        self.stop()
        if self.force_exit:
            # A thread of its own: the event loop may wait for a thread that can't be stopped.
            # Workers end with this process: their standard input does, and they remove their sockets.
            threading.Thread(target=_end_process, args=(sig,), daemon=True).start()
        _log.info(
            "%s: %s",
            signal.Signals(sig).name,
            "the end" if self.force_exit else "whoever is answered may finish; once more ends them",
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which would let the signal end the process before the engine is closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in _SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def _end_process(number: int) -> None:
    time.sleep(_ORDERED_SECONDS)
    os._exit(128 + number)


class Server(HttpServer):
    """Serves an engine.

    load: opens the model and makes the engine, in a thread, while clients hear that it is loaded; the server
    closes the engine. on_ready: is told when it is there. run() raises what load() raises.
    """

    def __init__(
        self, settings: Settings, load: Callable[[], Engine], on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self.service = Service(settings)
        self._load = load
        self._on_ready = on_ready
        super().__init__(settings, application(self.service))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by run(). The process is the server's: its threads take turns as that needs it."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.disable()
        with contextlib.suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
        loading = asyncio.ensure_future(self._make_ready())
        collecting = asyncio.ensure_future(self._collect())
        with self.capture_signals():  # to the very end: super().serve() lets go of them before that
            try:
                await super().serve(sockets)
            finally:
                # a thread that reads a file can't be stopped
                await asyncio.wait({loading})
                await asyncio.to_thread(self.service.close)
                collecting.cancel()
                gc.enable()
        loading.result()

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(_COLLECT_SECONDS)
            await self.service.slow_work.between_very_large(gc.collect)

    async def _make_ready(self) -> None:
        try:
            engine = await asyncio.to_thread(self._load)
            try:
                self.service.ready(engine)
            except BaseException:
                engine.close()
                raise
            gc.collect()
            gc.freeze()  # what is there now stays: the collector needn't look at it any more
            self._on_ready()
        except BaseException:
            self.should_exit = True
            raise

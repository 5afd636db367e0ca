"""A worker's process: a server on a Unix socket, for the router that started it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable

from pykvgraph.engine import Engine
from pykvgraph.errors import KVGraphError
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.run import Server
from pykvgraph.server.settings import Settings

# the lines that a worker says on its standard output
READY = b"ready "  # and how many cells its cache has
DRAINS = b"drains\n"
_STDIN = 0


def main() -> None:
    """Reads from standard input what to do, one line of JSON, and serves until a signal.

    Standard input stays open as long as the parent lives, so that its end, even by SIGKILL, is the worker's.
    """
    order = json.loads(_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    logging.basicConfig(format=f"worker {order['number']}: %(message)s")
    settings, spec = Settings(**order["settings"]), EngineSpec(**order["engine"])
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(order["path"])
            listener.listen()
            _Worker(settings, spec.load, out).run(sockets=[listener])
    except (KVGraphError, ImportError, OSError, MemoryError) as error:
        what = " ".join(str(error).split()) or "there is not enough memory"
        sys.exit(f"worker {order['number']}: {what}")


def _line() -> bytes:
    """By the descriptor alone: a thread that waits in a file object would keep the process from ending."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(_STDIN, 1 << 16)
        if not part:
            os._exit(1)  # the parent is gone already
        parts.append(part)
    return b"".join(parts)


def _end_with_parent() -> None:
    while os.read(_STDIN, 1 << 16):
        pass
    os._exit(1)


class _Worker(Server):
    """Tells its parent what becomes of it. out: the descriptor of a pipe to it."""

    def __init__(self, settings: Settings, load: Callable[[], Engine], out: int) -> None:
        self._out = out
        super().__init__(settings, load, self._say_ready)

    def stop(self) -> None:
        """As a signal does."""
        super().stop()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, and this process goes, too
            os.write(self._out, DRAINS)

    def _say_ready(self) -> None:
        os.write(self._out, READY + b"%d\n" % self.service.engine.context.n_ctx)

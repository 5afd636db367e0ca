"""A worker's process: a server on a Unix socket, for the router that started it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading

from pykvgraph.cluster.order import read_order, room_of
from pykvgraph.errors import KVGraphError
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.run import Server
from pykvgraph.server.settings import Settings

# the lines that a worker says on its standard output
READY = b"ready "  # and how many cells its cache has, and for how many tokens it has room
DRAINS = b"drains\n"
_STDIN = 0


def main() -> None:
    """Reads from standard input where to listen and what to do, two lines, and serves until a signal.

    Standard input stays open as long as the parent lives, so that its end, even by SIGKILL, is the worker's.
    """
    path, order = _lines()
    number, settings, spec = read_order(order)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    logging.basicConfig(format=f"worker {number}: %(message)s")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            _Worker(settings, spec, out).run(sockets=[listener])
    except (KVGraphError, ImportError, OSError, MemoryError) as error:
        what = " ".join(str(error).split()) or "there is not enough memory"
        sys.exit(f"worker {number}: {what}")


def _lines() -> tuple[str, str]:
    """By the descriptor alone: a thread that waits in a file object would keep the process from ending."""
    data = b""
    while data.count(b"\n") < 2:
        part = os.read(_STDIN, 1 << 16)
        if not part:
            os._exit(1)  # the parent is gone already
        data += part
    path, order, _ = data.decode().split("\n")
    return path, order


def _end_with_parent() -> None:
    while os.read(_STDIN, 1 << 16):
        pass
    os._exit(1)


class _Worker(Server):
    """Tells its parent what becomes of it. out: the descriptor of a pipe to it."""

    def __init__(self, settings: Settings, spec: EngineSpec, out: int) -> None:
        self._spec = spec
        self._out = out
        super().__init__(settings, spec.load, self._say_ready)

    def stop(self) -> None:
        """As a signal does."""
        super().stop()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, and this process goes, too
            os.write(self._out, DRAINS)

    def _say_ready(self) -> None:
        engine = self.service.engine
        os.write(self._out, READY + b"%d %d\n" % (engine.context.n_ctx, room_of(engine, self._spec)))

"""A worker's process: a server on a Unix socket, for the router that started it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path

from pykvgraph.cluster.copies import begun
from pykvgraph.cluster.order import Order, read_order
from pykvgraph.errors import KVGraphError
from pykvgraph.server.run import Server

# the lines that a worker says on its standard output
READY = b"ready "  # and a Told
DRAINS = b"drains\n"
READS = b"reads "  # and the name of a request
HAS_READ = b"has read "  # and the name
_STDIN = 0


def main() -> None:
    """Reads from standard input where to listen and what to do, two lines, and serves until a signal.

    Standard input stays open as long as the parent lives, so that its end, even by SIGKILL, is the worker's.
    """
    path, text = _lines()
    order = read_order(text)
    threading.Thread(target=_end_with_parent, args=(Path(path),), daemon=True).start()
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    logging.basicConfig(format=f"worker {order.number}: %(message)s")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            _Worker(order, f"unix:{copies_path(Path(path))}", out).run(sockets=[listener])
    except (KVGraphError, ImportError, OSError, MemoryError) as error:
        what = " ".join(str(error).split()) or "there is not enough memory"
        sys.exit(f"worker {order.number}: {what}")


def copies_path(path: Path) -> Path:
    """Where the worker that listens at a path takes copies."""
    return path.with_name(f"{path.name}.copies")


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


def _end_with_parent(path: Path) -> None:
    while os.read(_STDIN, 1 << 16):
        pass
    with contextlib.suppress(OSError):  # the folder isn't empty: another worker is there, and removes it
        for left in (path, copies_path(path)):
            left.unlink(missing_ok=True)
        path.parent.rmdir()
    os._exit(1)


class _Worker(Server):
    """Tells its parent what becomes of it. out: the descriptor of a pipe to it. address: for copies."""

    def __init__(self, order: Order, address: str, out: int) -> None:
        self._order = order
        self._address = address
        self._out = out
        super().__init__(order.settings, order.engine.load, self._say_ready)
        self.service.tell_reading = self._say_reading

    def stop(self) -> None:
        """As a signal does."""
        super().stop()
        self._say(DRAINS)

    def _say_ready(self) -> None:
        told = begun(self._order, self.service, self._address)
        os.write(self._out, READY + json.dumps(told._asdict()).encode() + b"\n")

    def _say_reading(self, name: str, begins: bool) -> None:
        self._say((READS if begins else HAS_READ) + name.encode() + b"\n")

    def _say(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, and this process goes, too
            os.write(self._out, line)

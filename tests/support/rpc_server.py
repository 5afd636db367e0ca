"""A ggml RPC server on loopback: `python -m support.rpc_server PORT [BYTES]` serves the CPU until killed.

BYTES: how much memory it has for whatever it is asked to keep.
"""

from __future__ import annotations

import ctypes
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pykvgraph as kvg

TESTS = Path(__file__).parents[1]


def library(stem: str) -> Path | None:
    """The file of a ggml library of this process; None when there is none."""
    return next((path for path in kvg.library_info().ggml_paths if path.name.startswith(f"{stem}.so")), None)


@contextmanager
def rpc_server(n_bytes: int | None = None) -> Iterator[str]:
    """Its "host:port", once it answers. n_bytes: of memory that it has; None: the machine's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [str(port)] if n_bytes is None else [str(port), str(n_bytes)]
    child = subprocess.Popen(
        [sys.executable, "-m", "support.rpc_server", *arguments], cwd=TESTS, stdout=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            if child.poll() is not None:
                raise RuntimeError(f"the RPC server ended with {child.returncode}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


def main(port: str, n_bytes: str | None = None) -> None:
    rpc, ggml = library("libggml-rpc"), library("libggml")
    assert rpc and ggml
    by_type = ctypes.CDLL(str(ggml)).ggml_backend_dev_by_type
    by_type.restype, by_type.argtypes = ctypes.c_void_p, [ctypes.c_int]
    start = ctypes.CDLL(str(rpc)).ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    devices = (ctypes.c_void_p * 1)(by_type(0))  # the CPU
    if n_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + int(n_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, devices)


if __name__ == "__main__":
    main(*sys.argv[1:])

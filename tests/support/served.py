"""Servers that a test asks: ours, in a thread, and llama-server, in a process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import pykvgraph as kvg
from pykvgraph.server.run import Server, address_of, listen
from pykvgraph.server.settings import Settings

RIVAL = Path(__file__).parents[2].parent / "shared" / "rivals" / "bin" / "llama-server"
N_SLOTS = 4
_SAID: dict[int, list[str]] = {}  # lines, by process


@contextlib.contextmanager
def served(load: Callable[[], kvg.Engine], **settings: Any) -> Iterator[tuple[str, Server]]:
    """Ours: its address, and itself; the engine is there."""
    ready = threading.Event()
    listener = listen("127.0.0.1", 0)
    server = Server(Settings(**{"n_slots": N_SLOTS, **settings}), load, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert ready.wait(30)
        yield address_of(listener), server
    finally:
        server.stop()
        thread.join(30)
        listener.close()
    assert not thread.is_alive()


@contextlib.contextmanager
def served_alone(model: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`pykvgraph serve` in a process of its own: its address, and the process, which is killed at the end."""
    command = [sys.executable, "-m", "pykvgraph", "serve", "-m", str(model), "-ngl", "0", "--port", "0"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = _SAID[process.pid] = []
            for line in process.stderr:
                said.append(line)
                if line.strip().endswith(": ready"):
                    # what it says later must be read, or the server waits for room in the pipe
                    listening = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
                    listening.start()
                    try:
                        yield line.split(": ")[0], process
                    finally:
                        process.kill()
                        listening.join(20)  # until its workers have ended, too: then the pipe may be closed
                    break
            else:
                raise AssertionError(f"the server has ended before it was ready: {said_by(process)}")
        finally:
            process.kill()


def said_by(process: subprocess.Popen[str]) -> str:
    """What a server of served_alone() has said so far."""
    return "".join(_SAID[process.pid])


@contextlib.contextmanager
def llama_server(model: Path, *arguments: str) -> Iterator[str]:
    """The rival's address. Skips where it isn't."""
    if not RIVAL.exists():
        pytest.skip("there is no llama-server to compare with")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [str(RIVAL), "-m", str(model), "-t", "1", "--port", str(port), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(1200):  # a minute, on a busy machine
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                time.sleep(0.05)
            else:
                raise RuntimeError(f"llama-server did not start: {process.poll()}")
            yield url
        finally:
            process.terminate()


def where_of(url: str) -> tuple[str, int]:
    """The host and the port of an address."""
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def events(text: str) -> list[Any]:
    """The values of a stream, whose events may have names; its end is "[DONE]"."""
    found = []
    for line in text.split("\n"):
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found

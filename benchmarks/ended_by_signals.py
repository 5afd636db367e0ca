"""How long a server takes to end after a second SIGTERM, at random moments of its life."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from hostile_clients import post
from support.hostile_requests import send
from support.served import where_of

LONGEST = 2.0  # seconds
_MOMENTS = 8.0  # seconds in which the first signal comes; the start is a part of them
_BETWEEN = 0.3  # seconds, at most, from the first signal to the second
_PATIENCE = 60.0  # seconds after which it is killed


class End(NamedTuple):
    """at: seconds from the start to the first signal. seconds: from the second one to the end. said: last."""

    seconds: float
    at: float
    said: str
    code: int


def ends(model: Path, n: int, seed: int = 0) -> list[End]:
    """n servers; the slowest first."""
    rng = random.Random(seed)
    return sorted((_end(model, rng) for _ in range(n)), reverse=True)


def _end(model: Path, rng: random.Random) -> End:
    command = [sys.executable, "-m", "pykvgraph", "serve", "-m", str(model), "--port", "0", "-c", "4096"]
    at, between = rng.uniform(0, _MOMENTS), rng.uniform(0, _BETWEEN)
    said = ["nothing"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        begin = time.monotonic()
        threading.Thread(target=_ask, args=(process, said), daemon=True).start()
        time.sleep(at)
        last = said[-1]
        process.send_signal(signal.SIGTERM)
        time.sleep(between)
        second = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return End(time.monotonic() - second, second - between - begin, last.rpartition(": ")[2], code)


def _ask(process: subprocess.Popen[str], said: list[str]) -> None:
    """Long answers, as soon as it listens, so that it has something to do when the signals come."""
    assert process.stderr is not None
    body = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 2000}
    for line in process.stderr:
        said.append(line.strip())
        if said[-1].endswith(": ready"):
            where = where_of(line.split(": ")[0])
            for _ in range(3):
                data = post("/v1/chat/completions", body)
                threading.Thread(target=_send, args=(where, data), daemon=True).start()


def _send(where: tuple[str, int], data: bytes) -> None:
    with contextlib.suppress(OSError):  # the server has ended
        send(where, data, _PATIENCE)

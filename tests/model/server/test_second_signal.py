"""The second SIGTERM ends a server within two seconds, whatever it is in."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.served import served_alone

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"
MOST_SECONDS = 2.0

SCRIPT = """
import sys, threading, time
import pykvgraph as kvg
from pykvgraph.server import service
from pykvgraph.server.run import Server, listen
from pykvgraph.server.settings import Settings

where = sys.argv[2]

def hang(*_):
    print("hangs", flush=True)
    while True:
        time.sleep(0.1)

def load():
    if where == "loading":
        hang()
    return kvg.Engine(kvg.Model(sys.argv[1], device="cpu"), n_ctx=256, n_seq_max=2)

if where == "template":  # in the event loop's thread
    service.ServerTemplate = hang
if where == "closing":
    service.Service.close = hang

def ready():
    print("ready", flush=True)

with listen("127.0.0.1", 0) as listener:
    Server(Settings(n_slots=2), load, ready).run(sockets=[listener])
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loading", "template", "closing"])
def test_the_second_ends_it(where: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(STORIES), where], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == ("ready" if where == "closing" else "hangs")
            process.send_signal(signal.SIGTERM)
            if where == "closing":
                assert process.stdout.readline().strip() == "hangs"
            time.sleep(0.3)
            assert process.poll() is None
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
            assert time.monotonic() - begin < MOST_SECONDS
        finally:
            process.kill()


@pytest.mark.slow
def test_workers_end_with_it() -> None:
    """And nothing of theirs is left: one of them hangs."""
    with served_alone(STORIES, "--workers", "2", "-c", "512") as (_, process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        folders = {Path(sockets) for sockets in _sockets(children)}
        assert folders
        for child in children[:1]:
            subprocess.run(["kill", "-STOP", child], check=True)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert time.monotonic() - begin < MOST_SECONDS
        for child in children[:1]:
            subprocess.run(["kill", "-CONT", child], check=False)
        end = time.monotonic() + 10
        while time.monotonic() < end and (any(map(Path.exists, folders)) or any(map(_lives, children))):
            time.sleep(0.05)
        assert not any(folder.exists() for folder in folders)
        assert not any(map(_lives, children))


def _lives(process: str) -> bool:
    """Whether it hasn't ended; one that nobody has waited for is still listed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _sockets(children: list[str]) -> list[str]:
    """Folders of the sockets on which these listen, as the kernel lists all of the machine's."""
    inodes = set()
    for child in children:
        for number in Path(f"/proc/{child}/fd").iterdir():
            target = number.readlink() if number.is_symlink() else Path()
            if str(target).startswith("socket:["):
                inodes.add(str(target)[8:-1])
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    found = [line.split() for line in lines]
    return [str(Path(parts[7]).parent) for parts in found if len(parts) > 7 and parts[6] in inodes]

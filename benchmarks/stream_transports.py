"""How many bytes a second `flush` carries to another process, beside a bare `sendall` of the same bytes.

    python benchmarks/stream_transports.py --json benchmarks/results/stream_transports.json

By turns: a round is one of each, in an order that changes; the figures are medians. unix and tcp have the
bare socket beside them, with the system's own buffers, and mpi the bare MPI_Send; memory (two threads) and
file have nothing. A turn ends when the receiver has said that it has everything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pykvgraph import stream

SIZES = {"16 MiB": (16 << 20, 16), "64 KiB": (64 << 10, 1024)}  # bytes of a region, regions of a turn
DONE = "done"
TOKEN = "of this benchmark"


def flush_all(end: stream.Transport, region: bytes | bytearray, n: int) -> float:
    """Seconds of a turn."""
    begin = time.perf_counter()
    for _ in range(n):
        end.flush("k", region)
    end.fetch(DONE, bytearray())
    return time.perf_counter() - begin


def fetch_all(end: stream.Transport, into: bytearray, n: int) -> None:
    for _ in range(n):
        end.fetch("k", into)
    end.flush(DONE, b"")


def send_all(bare: socket.socket, region: bytes, n: int) -> float:
    begin = time.perf_counter()
    for _ in range(n):
        bare.sendall(region)
    assert bare.recv(1)
    return time.perf_counter() - begin


def receive_all(bare: socket.socket, into: bytearray, n: int) -> None:
    view = memoryview(into)
    for _ in range(n):
        n_read = 0
        while n_read < len(into):
            n_more = bare.recv_into(view[n_read:])
            assert n_more
            n_read += n_more
    bare.sendall(b"1")


def turns(n_rounds: int) -> list[str]:
    return [each for i in range(n_rounds) for each in (("bare", "flush"), ("flush", "bare"))[i % 2]]


def bare_listener(kind: str, folder: Path) -> socket.socket:
    if kind == "tcp":
        return socket.create_server(("127.0.0.1", 0))
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "bare"))
    listening.listen()
    return listening


def receiver(address: str, where: str, size: int, n: int, n_rounds: int) -> None:
    """The other process."""
    is_unix = address.startswith("unix:")
    bare = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
    bare.connect(where if is_unix else ("127.0.0.1", int(where)))
    if not is_unix:
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    into = bytearray(os.urandom(size))  # its pages are there
    with bare, stream.open(address, TOKEN) as end:
        for turn in turns(n_rounds):
            receive_all(bare, into, n) if turn == "bare" else fetch_all(end, into, n)


def sockets(kind: str, size: int, n: int, n_rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        folder, region = Path(name), random.Random(0).randbytes(size)
        seconds: dict[str, list[float]] = {"bare": [], "flush": []}
        with (
            bare_listener(kind, folder) as listening,
            stream.listen(f"unix:{folder}/ours" if kind == "unix" else "tcp:0", TOKEN) as listener,
        ):
            where = str(folder / "bare") if kind == "unix" else str(listening.getsockname()[1])
            child = subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--receive",
                    listener.address,
                    where,
                    str(size),
                    str(n),
                    str(n_rounds),
                ]
            )
            bare, _ = listening.accept()
            if kind == "tcp":
                bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as ours
            with bare, listener.accept() as end:
                for turn in turns(n_rounds):
                    took = send_all(bare, region, n) if turn == "bare" else flush_all(end, region, n)
                    seconds[turn].append(took)
        child.wait()
    return seconds


def threads(kind: str, size: int, n: int, n_rounds: int) -> dict[str, list[float]]:
    region, into = random.Random(0).randbytes(size), bytearray(os.urandom(size))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        address = f"{kind}:{folder}"
        with stream.open(address) as one, stream.open(address) as other:
            for _ in range(n_rounds):
                thread = threading.Thread(target=fetch_all, args=(other, into, n))
                thread.start()
                seconds.append(flush_all(one, region, n))
                thread.join()
    return {"flush": seconds}


def ranks(size: int, n: int, n_rounds: int) -> None:
    """Both ranks of MPI; the first one prints the seconds."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    data = bytearray(os.urandom(size))
    seconds: dict[str, list[float]] = {"bare": [], "flush": []}
    with stream.open(f"mpi:{1 - world.rank}") as end:
        for turn in turns(n_rounds):
            world.Barrier()
            begin = time.perf_counter()
            if turn == "flush":
                flush_all(end, data, n) if world.rank == 0 else fetch_all(end, data, n)
            else:
                for _ in range(n):
                    world.Send([data, MPI.BYTE], 1) if world.rank == 0 else world.Recv([data, MPI.BYTE], 0)
            world.Barrier()
            seconds[turn].append(time.perf_counter() - begin)
    if world.rank == 0:
        print(json.dumps(seconds))


def processes_of_mpi(size: int, n: int, n_rounds: int) -> dict[str, list[float]]:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command = [str(mpiexec), "-n", "2", sys.executable, __file__, "--rank", str(size), str(n), str(n_rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def measure(kind: str, name: str, n_rounds: int) -> dict[str, Any]:
    """GB/s of each, and the median of the rounds' ratios."""
    size, n = SIZES[name]
    if kind == "mpi":
        seconds = processes_of_mpi(size, n, n_rounds)
    else:
        seconds = (sockets if kind in ("unix", "tcp") else threads)(kind, size, n, n_rounds)
    row: dict[str, Any] = {"transport": kind, "regions": name}
    for turn, took in seconds.items():
        row[turn] = round(statistics.median(size * n / each for each in took) / 1e9, 2)
    if "bare" in seconds:
        pairs = zip(seconds["bare"], seconds["flush"], strict=True)
        row["share"] = round(statistics.median(bare / flush for bare, flush in pairs), 3)
    return row


def main() -> None:
    if sys.argv[1:2] == ["--receive"]:
        address, where, *numbers = sys.argv[2:]
        receiver(address, where, *map(int, numbers))
        return
    if sys.argv[1:2] == ["--rank"]:
        ranks(*map(int, sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--transports", default="unix,tcp,mpi,memory,file")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    rows = []
    for kind in options.transports.split(","):
        for name in SIZES:
            rows.append(measure(kind, name, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"GB/s": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

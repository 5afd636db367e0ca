"""What streams cost: here, over each transport, and between two machines with 1 ms each way and 1 Gbit/s.

    python benchmarks/streams.py

It runs `pykvgraph bench --cache stream`, writes the figures and the pictures, and prints rows for the tables
of docs/streams.md; about 15 minutes. --only here, --only machines: one of both.

The machines are network namespaces, for which it needs root, `ip`, `taskset` and /dev/net/tun. Each side is
one command of pykvgraph. The sender has the first CPU, and one thread; the receiver and the cable have the
last CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import queue
import secrets
import shlex
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shapes import ROOT, SMALL, machine, written
from support.models import ModelSpec, WeightType  # shapes has told where

DELAY, BITS_PER_SECOND, MTU = 0.001, 1e9, 65000  # large packets: the cable is a program
CABLE = {"delay each way, s": DELAY, "bits a second": BITS_PER_SECOND}
# not the source, if that is the current folder
BENCH = [sys.executable, *shlex.split("-I -m pykvgraph bench -t 1 --cache stream")]
TRANSPORTS = ("unix", "tcp", "mpi", "file")
SENDER, RECEIVER = f"kvg-{os.getpid()}-a", f"kvg-{os.getpid()}-b"
ADDRESSES = {SENDER: "10.77.7.1", RECEIVER: "10.77.7.2"}
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


def interface(namespace: str) -> int:
    """The end of a cable in a namespace: its packets are read and written here."""
    name = f"kvg{namespace[-1]}"
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    run(f"ip link set {name} netns {namespace}")
    run(f"ip -n {namespace} address add {ADDRESSES[namespace]}/24 dev {name}")
    run(f"ip -n {namespace} link set {name} up mtu {MTU}")
    return end


def carry(source: int, target: int) -> None:
    """One direction of the cable, until its end goes with its namespace."""
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            at, packet = under_way.get()
            time.sleep(max(0.0, at - time.monotonic()))
            with contextlib.suppress(OSError):  # the other end is down
                os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    sent = 0.0  # when the last packet has left
    with contextlib.suppress(OSError):
        while packet := os.read(source, MTU):
            sent = max(sent, time.monotonic()) + 8 * len(packet) / BITS_PER_SECOND
            under_way.put((sent + DELAY, packet))


@contextlib.contextmanager
def namespaces() -> Iterator[None]:
    """Two of them, with a cable between them."""
    names = (SENDER, RECEIVER)
    try:
        for name in names:
            run(f"ip netns add {name}")
        ends = [interface(name) for name in names]
        for source, target in (ends, ends[::-1]):
            threading.Thread(target=carry, args=(source, target), daemon=True).start()
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def bench(namespace: str, cpu: int, model: Path, arguments: str) -> subprocess.Popen[str]:
    command = [*shlex.split(f"ip netns exec {namespace} taskset -c {cpu}"), *BENCH, "-m", str(model)]
    return subprocess.Popen([*command, *shlex.split(arguments)], stdout=subprocess.PIPE, text=True)


def measured_here(model: Path, arguments: str) -> list[dict[str, Any]]:
    over = " ".join(f"--over {kind}" for kind in TRANSPORTS)
    command = [*BENCH, "-m", str(model), *shlex.split(f"-p 0 -n 0 {over} {arguments}")]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(told.stdout)["streams"]
    return found


def measured_between(model: Path, arguments: str) -> list[dict[str, Any]]:
    os.environ["KVGRAPH_STREAM_TOKEN"] = secrets.token_hex(32)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[-1:])  # the cable
    address = f"tcp:{ADDRESSES[RECEIVER]}:0"
    with namespaces(), bench(RECEIVER, cpus[-1], model, f"--receive {address}") as receiver:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().split()[2].rstrip(";")
        with bench(SENDER, cpus[0], model, f"-p 0 -n 0 --to {address} {arguments}") as sender:
            told, _ = sender.communicate()
        if sender.returncode:
            receiver.terminate()
            raise SystemExit(sender.returncode)
        print(receiver.communicate()[0].splitlines()[-1])
    found: list[dict[str, Any]] = json.loads(told)["streams"]
    return found


def table_rows(streams: list[dict[str, Any]]) -> Iterator[str]:
    """As docs/streams.md has them: of levels 0 to 3 the prompt's milliseconds, tokens and totals."""
    for way in dict.fromkeys((row["transport"], row["depth"]) for row in streams):
        own = [row for row in streams if (row["transport"], row["depth"]) == way and row["level"] is not None]
        cells = [f"{row['behind'] * 1e3:.1f}" for row in own]
        cells += [f"{row['token_more']:.1%}" for row in own] + [f"{row['total_more']:.1%}" for row in own]
        yield f"| {way[0]}, {way[1]} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file; default: 219 M random parameters in Q8_0")
    parser.add_argument("--only", choices=("here", "machines"))
    parser.add_argument("--depths", help="tokens of the prompts; default: 2000, between machines 500,2000")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    here = machine()  # before this process has one CPU of it
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or written(ModelSpec(weights=WeightType.Q8_0, **SMALL), Path(folder))
        name = options.model.name if options.model else "219M-Q8_0"
        for part, file, depths, measured, where in (
            ("here", "stream", "2000", measured_here, {}),
            ("machines", "stream_machines", "500,2000", measured_between, {"cable": CABLE}),
        ):
            if options.only not in (None, part):
                continue
            picture = shlex.quote(str(options.pictures / f"{file}.png"))
            arguments = f"-d {options.depths or depths} -r {options.repetitions} --json --plot {picture}"
            streams = measured(model, arguments)
            print("\n".join(table_rows(streams)), flush=True)
            report = {"machine": here, "model": name, "threads": 1, **where, "streams": streams}
            text = json.dumps(report, indent=1) + "\n"
            (options.results / f"{file}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

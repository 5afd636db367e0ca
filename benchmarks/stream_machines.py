"""`pykvgraph bench --cache stream` between two network namespaces: 1 ms of delay each way, and 1 Gbit/s.

    python benchmarks/stream_machines.py --json benchmarks/results/stream_machines.json --plot picture.png

Needs root, `ip`, `taskset` and /dev/net/tun. Each side is one command of pykvgraph, as on two machines. The
sender has the first CPU, and one thread; the receiver and the cable have the last CPU.
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

from shapes import SMALL, machine, written
from support.models import ModelSpec, WeightType  # shapes has told where

DELAY, BITS_PER_SECOND, MTU = 0.001, 1e9, 65000  # large packets: the cable is a program
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
    where = (
        f"ip netns exec {namespace} taskset -c {cpu} {shlex.quote(sys.executable)} -m pykvgraph bench -t 1"
    )
    command = [*shlex.split(where), "-m", str(model), "--cache", "stream", *shlex.split(arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(model: Path, depths: str, repetitions: int, plot: Path | None) -> list[dict[str, Any]]:
    os.environ["KVGRAPH_STREAM_TOKEN"] = secrets.token_hex(32)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[-1:])  # the cable
    address = f"tcp:{ADDRESSES[RECEIVER]}:0"
    with namespaces(), bench(RECEIVER, cpus[-1], model, f"--receive {address}") as receiver:
        assert receiver.stdout is not None
        address = receiver.stdout.readline().split()[2].rstrip(";")
        drawn = f"--plot {shlex.quote(str(plot))}" if plot else ""
        arguments = f"-p 0 -n 0 -d {depths} -r {repetitions} --to {address} --json {drawn}"
        with bench(SENDER, cpus[0], model, arguments) as sender:
            told, _ = sender.communicate()
        if sender.returncode:
            receiver.terminate()
            raise SystemExit(sender.returncode)
        print(receiver.communicate()[0].splitlines()[-1])
    found: list[dict[str, Any]] = json.loads(told)["streams"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file; default: 219 M random parameters in Q8_0")
    parser.add_argument("--depths", default="500,2000", help="tokens of the prompts")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--plot", type=Path, help="a PNG, SVG or PDF")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or written(ModelSpec(weights=WeightType.Q8_0, **SMALL), Path(folder))
        streams = measure(model, options.depths, options.repetitions, options.plot)
    for row in streams:
        print(json.dumps(row))
    if options.json:
        name = options.model.name if options.model else "219M-Q8_0"
        cable = {"delay each way, s": DELAY, "bits a second": BITS_PER_SECOND}
        report = {"machine": machine(), "model": name, "threads": 1, "cable": cable, "streams": streams}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Several workers behind one address: one only reads prompts, one is killed while it answers, nobody is lost.

    python examples/cluster.py -m model.gguf --workers 4 --clients 6 -n 120
    python examples/cluster.py -m model.gguf --workers 4 --cluster auto      # the workers are actors of Ray

It starts `pykvgraph serve` and asks it as any client would. When the first answer is a few words long, the
process of worker 0 is killed with SIGKILL: another one goes on with its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

N_SLOTS = 4  # requests that a worker answers at a time
KILL_AFTER = 20  # tokens of the first answer
NAMES = "Tom", "Lily", "Ben", "Mia", "Sue", "Max", "Anna", "Tim"
STORY = "{0} went to the park with a big dog. {0} saw a bird in a tree, and the bird sang a song. " * 7


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers that read, answer, die and stand in for others.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument(
        "--workers", type=int, default=4, help="3 or more, of which the last only reads (default: 4)"
    )
    parser.add_argument("--clients", type=int, default=6, help="that ask at a time (default: 6)")
    parser.add_argument("-n", type=int, default=120, help="tokens of each answer (default: 120)")
    parser.add_argument("--cluster", metavar="auto|ADDRESS", help="a Ray cluster (default: processes here)")
    args = parser.parse_args()
    if args.workers < 3:
        parser.error("--workers: 3 or more, as one reads, one dies, and one goes on")
    with Server(args.m, args.workers, args.cluster) as server:
        asyncio.run(ask_all(server, args.clients, args.n))
        server.show_table()


class Server:
    """`pykvgraph serve` in a process of its own; what it says is shown."""

    def __init__(self, model: str, n_workers: int, cluster: str | None) -> None:
        command = [sys.executable, "-I", "-m", "pykvgraph", "serve", "-m", model, "--port", "0", "--metrics"]
        command += ["--workers", str(n_workers), "--prefill-workers", "1", "--replicate"]
        command += ["-c", "8192", "-np", str(N_SLOTS), "-t", "1"]
        self._command = command + (["--cluster", cluster] if cluster else [])
        self.address = ""
        self._said: list[str] = []
        self._is_ready = threading.Event()

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, daemon=True).start()
        self._is_ready.wait()
        if not self.address:
            self._process.wait()
            sys.exit("the server has ended: it says why above")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            print(f"    {line}", end="", flush=True)
            if line.strip().endswith(": ready"):
                self.address = line.split(": ")[0]
                self._is_ready.set()
        self._is_ready.set()

    def kill(self, worker: int) -> None:
        """Ends a worker's process, as a crash would."""
        where = rf"worker {worker} is ready \(process (\d+)(?: at http://\[?([^]]+)\]?:\d+)?\)"
        pid, host = re.findall(where, "".join(self._said))[-1]
        if host and not is_here(host):
            print(f"    worker {worker} is on {host}, and is left alone", flush=True)
            return
        print(f"    kill -9 {pid}, which is worker {worker}", flush=True)
        os.kill(int(pid), signal.SIGKILL)

    def show_table(self) -> None:
        """What each worker has done, when all of them can tell it."""
        workers = self._workers()
        while any("tokens_predicted" not in each for each in workers):  # one is just being started again
            time.sleep(0.05)
            workers = self._workers()
        print("\nworker   prompts: tokens decoded   loaded, as others had them   tokens said")
        for each in workers:
            told = each["prompt_tokens"], each["tier_loaded_tokens"], each["tokens_predicted"]
            print("{:6} {:25} {:28} {:13}".format(each["worker"], *told))

    def _workers(self) -> list[dict[str, Any]]:
        """As `pykvgraph cluster status --json` has them."""
        found: list[dict[str, Any]] = httpx.get(f"{self.address}/workers").raise_for_status().json()
        return found


def is_here(host: str) -> bool:
    """Whether it is an address of this machine: on another one its number may be any process."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        try:
            tried.bind((host, 0))
        except OSError:
            return False
    return True


async def ask_all(server: Server, n_clients: int, n: int) -> None:
    """Each client asks once, all at a time; one worker is killed meanwhile."""
    is_killed = False

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        nonlocal is_killed
        name, text, n_events = NAMES[number % len(NAMES)], "", 0
        prompt = STORY.format(name) + f"One day, {name}"
        body = {"prompt": prompt, "n_predict": n, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/completion", json=body) as reply:
            if reply.is_error:
                sys.exit(f"the server refuses it: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    sys.exit(f"the server gives up: {event['error']['message']}")
                text += event["content"]
                n_events += 1
                if n_events == KILL_AFTER and not is_killed:
                    is_killed = True
                    server.kill(0)
        worker, n_said = event["id_slot"] // N_SLOTS, event["tokens_predicted"]
        beginning = " ".join(f"{name}{text}".split())[:60]
        print(f"client {number}: {n_said} tokens, the last of worker {worker}: {beginning} ...", flush=True)

    async with httpx.AsyncClient(base_url=server.address, timeout=600) as client:
        await asyncio.gather(*(ask(client, number) for number in range(n_clients)))


if __name__ == "__main__":
    try:
        main()
    except (httpx.HTTPError, OSError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

"""Two workers that do everything, beside one that reads prompts and one that answers (--prefill-workers 1).

    python benchmarks/roles.py                # four minutes on two cores

first: milliseconds from a request to its first token, prompts of random tokens, one at a time. gaps: while
two others are answered, prompts of the same length come one after another, each for one token; told are the
milliseconds between the tokens of the two. Servers have their turns, with one thread for each worker; medians
of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from shapes import ROOT, SMALL, machine, with_tokenizer, written
from support.models import ModelSpec, WeightType  # shapes has told where

import pykvgraph as kvg
from pykvgraph.bench.servers import HOST, Client, started

WORKERS: dict[str, tuple[str, ...]] = {
    "alike": ("--workers", "2", "--cache-ram", "1024"),
    "roles": ("--workers", "2", "--prefill-workers", "1"),
    "alone": (),
}
N_SLOTS = 4


def wait_for_all(port: int, n: int) -> None:
    """A server says that it is well as soon as one of its workers is."""
    while len(json.load(urllib.request.urlopen(f"http://{HOST}:{port}/slots"))) < n * N_SLOTS:
        time.sleep(0.1)


def first_token(client: Client, ids: list[int]) -> float:
    """Milliseconds."""
    begin, seconds = time.perf_counter(), 0.0
    for _ in client.complete(ids, 2):
        seconds = seconds or time.perf_counter() - begin
    return seconds * 1e3


def gaps_amid(client: Client, talks: list[list[int]], prompts: list[list[int]], n: int) -> list[float]:
    """Milliseconds between the tokens of the talks while the prompts come; of n tokens at most."""
    found: list[float] = []
    runs = threading.Event()
    n_begun = threading.Semaphore(0)

    def talk(ids: list[int]) -> None:
        last = 0.0
        for event in client.complete(ids, n):
            now = time.perf_counter()
            if not last:
                n_begun.release()
            elif runs.is_set() and event["tokens"]:
                found.append((now - last) * 1e3)
            last = now

    threads = [threading.Thread(target=talk, args=(ids,)) for ids in talks]
    for thread in threads:
        thread.start()
    for _ in threads:
        n_begun.acquire()
    runs.set()
    for ids in prompts:
        first_token(client, ids)
    runs.clear()
    for thread in threads:
        thread.join()
    return found


def measure(command: list[str], args: argparse.Namespace, tokenizer: Any, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return [int(token) for token in rng.integers(3, tokenizer.n_vocab, n)]

    with args.json.with_suffix(".log").open("ab") as log, started(command, log) as port:
        wait_for_all(port, 2 if "--workers" in command else 1)
        client = Client(port, tokenizer)
        first_token(client, ids(args.prompt))  # the files are in memory
        firsts = [first_token(client, ids(args.prompt)) for _ in range(args.requests)]
        gaps = gaps_amid(client, [ids(64), ids(64)], [ids(args.prompt) for _ in range(2)], args.say)
    return {
        "first": statistics.median(firsts),
        "gap p50": float(np.quantile(gaps, 0.5)),
        "gap p95": float(np.quantile(gaps, 0.95)),
        "gap max": max(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = ROOT / "build"
    parser.add_argument("--models", type=Path, default=folder / "models", help="folder of the models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--requests", type=int, default=3, help="of a round whose first token is timed")
    parser.add_argument("--say", type=int, default=400, help="tokens of the two who are answered")
    parser.add_argument("--json", type=Path, default=folder / "roles.json", help="what was measured")
    args = parser.parse_args()
    for directory in (args.models, args.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    source = written(ModelSpec(**SMALL, weights=WeightType.Q8_0), args.models)
    path = with_tokenizer(source, args.models / "roles.gguf").resolve()
    serve = [str(Path(sys.executable).with_name("pykvgraph")), "serve", "-m", str(path), "-t", "1"]
    serve += ["-np", str(N_SLOTS), "-c", "16384"]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in WORKERS}
    with kvg.Model(path, device="cpu") as model:
        for seed in range(args.rounds):
            for name, options in WORKERS.items():
                rounds[name].append(measure([*serve, *options], args, model.tokenizer, seed))
    report: dict[str, Any] = {"machine": machine(), "prompt": args.prompt, "rounds": args.rounds}
    print(f"{'':8}" + "".join(f"{what:>10}" for what in rounds["alone"][0]))
    for name, found in rounds.items():
        medians = {what: round(statistics.median(each[what] for each in found), 1) for what in found[0]}
        report[name] = medians
        print(f"{name:8}" + "".join(f"{value:10.1f}" for value in medians.values()))
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

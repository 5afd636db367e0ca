"""Prompts that share a beginning, one after the other: pykvgraph serve beside llama-server on one file.

python benchmarks/branches.py                  # minutes a model and server

Each case's prompts are random token ids, sent by /completion over HTTP on loopback; each has 8 tokens said.
"turns" is the conversation with edits of benchmarks/turns.py. A server starts anew for each case. Printed:
how many tokens of all prompts were decoded (timings.prompt_n), and the sum of the times from each request to
the first piece of its answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from shapes import ROOT, machine, with_tokenizer, written
from turns import MODELS, N_THREADS, SERVER, SERVERS, ServerSpeaker

import pykvgraph as kvg
from pykvgraph.bench.servers import Client, started
from pykvgraph.bench.turns import converse, write_script

OURS = "pykvgraph"
# tokens that all prompts share; tokens of each that are its own
CASES: dict[str, tuple[int, list[int]]] = {
    "long": (6476, [40, 376, 1296]),
    "agents": (1500, [700] * 8),
    "short": (480, [60] * 12),
}
TURNS = "turns"
N_TURNS_PROMPT = 4000
N_SAID = 8


class Cost(NamedTuple):
    """Of all requests of a case. n_decoded: tokens of prompts. seconds: until the first tokens."""

    n_prompt: int
    n_decoded: int
    seconds: float


def prompts_of(case: str, n_vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    n_shared, own = CASES[case]
    shared = rng.integers(3, n_vocab, n_shared).tolist()
    return [shared + rng.integers(3, n_vocab, n).tolist() for n in own]


def ask(client: Client, prompts: list[list[int]]) -> Cost:
    n_decoded, seconds = 0, 0.0
    for prompt in prompts:
        start, first = time.perf_counter(), 0.0
        for event in client.complete(prompt, N_SAID):
            first = first or time.perf_counter() - start
            n_decoded += event.get("timings", {}).get("prompt_n", 0)
        seconds += first
    return Cost(sum(map(len, prompts)), n_decoded, seconds)


def measure(case: str, model: kvg.Model, command: list[str], log: Path) -> Cost:
    """One server, one case."""
    if case == TURNS:
        script = write_script(model, N_TURNS_PROMPT)
        n_cells = script.n_cells
    else:
        prompts = prompts_of(case, model.n_vocab)
        # as much as each has alone: so that nothing is given up
        n_cells = sum(map(len, prompts)) + N_SAID * len(prompts)
    size = ["-c", str(-(-n_cells // 256) * 256), "-np", "1"]
    with log.open("ab") as out, started([*command, *size], out) as port:
        if case == TURNS:
            turns = list(converse(ServerSpeaker(port, model.tokenizer), script))
            n_prompt = sum(turn.n_prompt for turn in turns)
            n_decoded = sum(turn.n_new + turn.n_again for turn in turns)
            return Cost(n_prompt, n_decoded, sum(turn.seconds for turn in turns))
        return ask(Client(port, model.tokenizer), prompts)


def commands(path: Path, names: list[str], server: Path) -> Iterator[tuple[str, list[str]]]:
    model = ["-m", str(path), "-t", str(N_THREADS), "-tb", str(N_THREADS)]
    yield OURS, [str(Path(sys.executable).with_name("pykvgraph")), "serve", *model]
    for name in names:
        yield name, [str(server), *model, *SERVERS[name]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = ROOT / "build"
    parser.add_argument("--server", type=Path, default=SERVER, help="llama-server (default: %(default)s)")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="its options")
    parser.add_argument("--json", type=Path, default=folder / "branches.json", help="what was measured")
    parser.add_argument("--models", type=Path, default=folder / "models", help="folder of the models")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=["qwen35", "gemma3"], help="models")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, TURNS], default=[*CASES, TURNS])
    args = parser.parse_args()
    for directory in (args.models, args.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"models": {}}
    if args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
    report |= {"machine": machine(), "n_threads": N_THREADS}
    print(f"{'model':<9}{'case':<8}{'server':<11}{'prompts':>8}{'decoded':>9}{'seconds':>9}")
    for name in args.only:
        path = with_tokenizer(written(MODELS[name], args.models), args.models / f"turns-{name}.gguf")
        with kvg.Model(path, device="cpu") as model:
            for case in args.cases:
                for server, command in commands(path, args.servers, args.server):
                    cost = measure(case, model, command, args.json.with_suffix(".log"))
                    report["models"].setdefault(name, {}).setdefault(case, {})[server] = cost._asdict()
                    args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
                    row = f"{cost.n_prompt:>8}{cost.n_decoded:>9}{cost.seconds:>9.1f}"
                    print(f"{name:<9}{case:<8}{server:<11}{row}", flush=True)


if __name__ == "__main__":
    main()

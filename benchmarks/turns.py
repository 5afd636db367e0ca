"""A conversation of 10 turns, with edits and repeated answers: pykvgraph beside llama-server on one file.

python benchmarks/turns.py                     # minutes a model; on a quiet machine
python benchmarks/turns.py --plot results.json out.png

The conversation is that of `pykvgraph bench --cache turns`. It goes to llama-server as token ids, by
/completion over HTTP on loopback, with the delimiters that its chat endpoint would find, so that it keeps a
checkpoint where a user's message begins. The weights are random, so the engines answer differently. Each goes
on from its own answer; all answers have the same number of tokens, and so have all prompts. One engine runs
at a time, and each conversation has a process of its own.

"Decoded again" are tokens of the prompt that the engine's cache had after its last answer, counted from the
first token on, and that were decoded nevertheless; llama-server says how many it took from its cache
(timings.cache_n). The time to the first token is that from the request to the first piece of the answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shapes import GEMMA3, GEMMA4, GPT_OSS, QWEN35, ROOT, machine, with_tokenizer, written
from support.architectures import ArchSpec  # shapes has told where

import pykvgraph as kvg
from pykvgraph.bench.servers import Client, started
from pykvgraph.bench.turns import (
    ANSWER,
    USER,
    Answer,
    MeasuredTurn,
    Prompt,
    Script,
    converse,
    medians,
    write_script,
)

MODELS: dict[str, ArchSpec] = {"qwen35": QWEN35, "gemma4": GEMMA4, "gemma3": GEMMA3, "gpt-oss": GPT_OSS}
OURS = "pykvgraph"
# name: options
SERVERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "cms512": ("-cms", "512"),
    "kvu": ("-kvu",),
    "b64": ("-b", "64"),
}
SERVER = ROOT.parent / "shared" / "rivals" / "bin" / "llama-server"
N_THREADS = 2


class ServerSpeaker:
    """llama-server, which is told what a user's message begins with."""

    def __init__(self, port: int, tokenizer: kvg.Tokenizer) -> None:
        delimiters = [
            {"role": "user", "delimiter": USER},
            {"role": "assistant", "delimiter": ANSWER},
        ]
        self._client = Client(port, tokenizer, {"message_delimiters": delimiters})

    def answer(self, prompt: Prompt, n_tokens: int) -> Answer:
        tokens: list[int] = []
        seconds, n_kept = 0.0, 0
        start = time.perf_counter()
        for event in self._client.complete(prompt.ids, n_tokens):
            seconds = seconds or time.perf_counter() - start
            tokens += event["tokens"]
            n_kept = event.get("timings", {}).get("cache_n", n_kept)
        return Answer(tokens, n_kept, seconds)


def ours(model: Path, n_prompt: int) -> list[MeasuredTurn]:
    """In a process of its own, and not in the source tree, which Python would take for the package."""
    command = [
        sys.executable,
        "-m",
        "pykvgraph",
        "bench",
        "-m",
        model.name,
        "-t",
        str(N_THREADS),
        "-o",
        "json",
    ]
    command += ["-p", "0", "-n", "0", "-r", "1", "-d", str(n_prompt), "--cache", "turns"]
    done = subprocess.run(command, cwd=model.parent, check=True, stdout=subprocess.PIPE, text=True)
    return [
        MeasuredTurn(row["turn"], row["n_prompt"], row["n_old"], row["n_again"], row["first_token_ms"] / 1e3)
        for row in json.loads(done.stdout)["turns"]
        if row["through"] == "TokenSequence"
    ]


def theirs(
    program: Path, model: Path, script: Script, tokenizer: kvg.Tokenizer, name: str, log: Path
) -> list[MeasuredTurn]:
    n_ctx = -(-script.n_cells // 256) * 256
    threads = ("-t", str(N_THREADS), "-tb", str(N_THREADS))
    command = [str(program), "-m", str(model), "-c", str(n_ctx), *threads, *SERVERS[name]]
    with log.open("ab") as out, started(command, out) as port:
        return list(converse(ServerSpeaker(port, tokenizer), script))


def measure(
    path: Path, args: argparse.Namespace, engines: list[str]
) -> Iterator[tuple[str, list[MeasuredTurn]]]:
    """The engines by turns, each conversation `-r` times; each as it ends."""
    with kvg.Model(path, device="cpu") as model:
        script, tokenizer = write_script(model, args.n_prompt), model.tokenizer
    log = args.json.parent / "llama-server.log"
    for engine in engines * args.r:
        if engine == OURS:
            yield engine, ours(path, args.n_prompt)
        else:
            yield engine, theirs(args.server, path, script, tokenizer, engine, log)


def medians_in(report: dict[str, Any], model: str) -> dict[str, list[MeasuredTurn]]:
    """The turns of each engine, over all of its conversations."""
    return {
        engine: medians([[MeasuredTurn(**turn) for turn in turns] for turns in conversations])
        for engine, conversations in report["models"][model].items()
    }


def show(model: str, found: dict[str, list[MeasuredTurn]]) -> None:
    """Two tables, a column for each engine; the last row is the sum."""
    tables: dict[str, Callable[[MeasuredTurn], int]] = {
        "old tokens decoded again": lambda turn: turn.n_again,
        "ms to the first token": lambda turn: round(turn.seconds * 1e3),
    }
    for what, value in tables.items():
        print(f"\n{model}: {what}")
        print(f"{'turn':<10}{'prompt':>7}{'new':>6}", *(f"{engine:>10}" for engine in found))
        for i, turn in enumerate(next(iter(found.values()))):
            figures = [value(turns[i]) for turns in found.values()]
            print(f"{turn.name:<10}{turn.n_prompt:>7}{turn.n_new:>6}", *(f"{each:>10}" for each in figures))
        sums = [sum(map(value, turns)) for turns in found.values()]
        print(f"{'all':<23}", *(f"{each:>10}" for each in sums), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = ROOT / "build"
    parser.add_argument("--server", type=Path, default=SERVER, help="llama-server (default: %(default)s)")
    parser.add_argument(
        "--json",
        type=Path,
        default=folder / "turns.json",
        help="where conversations are added",
    )
    parser.add_argument("--models", type=Path, default=folder / "models", help="folder of the models")
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=["qwen35", "gemma4", "gpt-oss"], help="models"
    )
    parser.add_argument(
        "--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="options of llama-server"
    )
    parser.add_argument("--n-prompt", type=int, default=4000, help="of the first prompt (default: 4000)")
    parser.add_argument("-r", type=int, default=1, help="repetitions (default: 1)")
    parser.add_argument(
        "--plot", type=Path, nargs=2, metavar=("JSON", "PNG"), help="draw results, run nothing"
    )
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    for directory in (args.models, args.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    engines = [OURS]
    if args.server.exists():
        engines += args.servers
    else:
        print(f"SKIPPED: llama-server: there is none at {args.server}; give --server", file=sys.stderr)
    report: dict[str, Any] = {"models": {}}
    if args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
    report |= {"machine": machine(), "n_prompt": args.n_prompt, "n_threads": N_THREADS}
    for name in args.only:
        source = written(MODELS[name], args.models)
        heard = report["models"].setdefault(name, {})
        path = with_tokenizer(source, source.with_name(f"turns-{name}.gguf"))
        for engine, turns in measure(path, args, engines):
            heard.setdefault(engine, []).append(list(map(vars, turns)))
            args.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
        show(name, medians_in(report, name))
    print(args.json)


def plot(source: Path, target: Path) -> None:
    from pykvgraph.viz import plot_turns

    report = json.loads(source.read_text(encoding="utf-8"))
    shown = {
        model: {
            engine if engine == OURS else f"llama-server {engine}": turns
            for engine, turns in medians_in(report, model).items()
        }
        for model in report["models"]
    }
    plot_turns(shown, target)


if __name__ == "__main__":
    main()

"""Many conversations with cells for few of them: pykvgraph serve beside llama-server, each with --cache-ram.

    python benchmarks/conversations.py                # minutes a model and server

The conversations have a turn each, in an order drawn anew, then the next turn. What a user says is random
token ids; requests go to /completion over HTTP on loopback, one after the other. Both servers have the same
cells and the same --cache-ram. "again": of the old tokens of a prompt, those of the conversation's last
prompt and answer, how many were decoded again, as timings.cache_n tells. The last token said is no old one:
nobody has decoded it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from shapes import GEMMA3, QWEN35, ROOT, machine, with_tokenizer, written
from support.architectures import ArchSpec  # shapes has told where
from support.models import ModelSpec, WeightType

import pykvgraph as kvg
from pykvgraph.bench.servers import Client, started

OURS = "pykvgraph"
SERVER = ROOT.parent / "shared" / "rivals" / "bin" / "llama-server"
# fewer and narrower layers than elsewhere, for 1,000 turns in a minute: what is kept is the same
MODELS: dict[str, ModelSpec | ArchSpec] = {
    "llama": ModelSpec(n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_ff=1536, weights=WeightType.Q8_0),
    "qwen35": replace(QWEN35, n_layer=4, n_embd=512, n_ff=1536),
    "gemma3": replace(GEMMA3, n_layer=6, n_embd=512, n_ff=1536),
}


class Talk:
    """One conversation. n_old: tokens that the server has decoded in its earlier turns."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.n_old = 0


def ask(client: Client, talk: Talk, new: list[int], n_say: int) -> tuple[int, float]:
    """How many tokens came from the cache, and the seconds until the first piece."""
    talk.ids += new
    start, first, n_kept = time.perf_counter(), 0.0, 0
    said: list[int] = []
    for event in client.complete(talk.ids, n_say):
        first = first or time.perf_counter() - start
        said += event["tokens"]
        n_kept = event.get("timings", {}).get("cache_n", n_kept)
    talk.ids += said
    return n_kept, first


def converse(client: Client, n_vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    talks = [Talk() for _ in range(args.talks)]
    n_old = n_kept = 0
    firsts: list[float] = []
    begin = time.perf_counter()
    for turn in range(args.turns):
        for i in rng.permutation(len(talks)):
            talk = talks[i]
            kept, first = ask(client, talk, rng.integers(3, n_vocab, args.new).tolist(), args.say)
            n_old, n_kept = n_old + talk.n_old, n_kept + min(kept, talk.n_old)
            talk.n_old = len(talk.ids) - 1
            if turn:
                firsts.append(first)
    return {
        "old": n_old,
        "again": n_old - n_kept,
        "kept_share": round(n_kept / n_old, 4),
        "first_token_ms": round(statistics.median(firsts) * 1e3, 2),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def commands(path: Path, args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    n_ctx = args.fit * args.turns * (args.new + args.say)
    options = [
        "-m",
        str(path),
        "-t",
        str(args.threads),
        "-tb",
        str(args.threads),
        "-c",
        str(-(-n_ctx // 256) * 256),
    ]
    options += ["--cache-ram", str(args.cache_ram)]
    yield OURS, [str(Path(sys.executable).with_name("pykvgraph")), "serve", *options]
    yield "llama-server", [str(args.server), *options]
    yield f"llama-server -np {args.fit}", [str(args.server), *options, "-np", str(args.fit)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = ROOT / "build"
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="which of its models")
    parser.add_argument("--models", type=Path, default=folder / "models", help="folder of the models")
    parser.add_argument("--server", type=Path, default=SERVER, help="llama-server (default: %(default)s)")
    parser.add_argument("--servers", nargs="+", help="by their names in the table; default: all")
    parser.add_argument("--cache-ram", type=int, default=1024, help="MiB of each server")
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--talks", type=int, default=200)
    parser.add_argument("--fit", type=int, default=20, help="conversations for which there are cells")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--new", type=int, default=32, help="tokens that a user says")
    parser.add_argument("--say", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--json", type=Path, default=folder / "conversations.json", help="what was measured")
    args = parser.parse_args()
    for directory in (args.models, args.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    report = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    report["machine"] = machine()
    print(f"{'model':<12}{'server':<22}{'old':>8}{'again':>8}{'kept':>8}{'first ms':>10}{'seconds':>9}")
    for name in args.only:
        path = with_tokenizer(written(MODELS[name], args.models), args.models / f"talks-{name}.gguf")
        with kvg.Model(path, device="cpu") as model:
            for server, command in commands(path.resolve(), args):
                if args.servers and server not in args.servers:
                    continue
                with args.json.with_suffix(".log").open("ab") as log, started(command, log) as port:
                    found = converse(Client(port, model.tokenizer), model.n_vocab, args)
                found |= {
                    "n_threads": args.threads,
                    "cache_ram": args.cache_ram,
                    "talks": args.talks,
                    "fit": args.fit,
                    "turns": args.turns,
                }
                report.setdefault("conversations", {}).setdefault(name, {})[server] = found
                args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                row = f"{found['old']:>8}{found['again']:>8}{found['kept_share']:>8.1%}"
                print(
                    f"{name:<12}{server:<22}{row}{found['first_token_ms']:>10}{found['seconds']:>9}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""An agent whose old tool results are cleared: pykvgraph serve, exact and edited, beside llama-server.

    make real
    python benchmarks/edits.py                # minutes: SmolLM2-135M
    python benchmarks/edits.py --turns 40 --result 2000
    python benchmarks/edits.py --turns 40 --result 2000 --model stories260K.gguf      # the same counts sooner

One conversation over HTTP on loopback; each server gets the same prompts, one after the other. Each turn
brings the result of a tool; of the results the last --keep stay, and each older one becomes a short note. A
table tells, over all turns but the first, how many prompt tokens were decoded, which share that is of
llama-server's least, how many of those that stay from one prompt to the next were decoded again, and the
milliseconds to the first token. Counts depend on the tokenizer and on nothing else of a model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shapes import ROOT, machine

import pykvgraph as kvg
from pykvgraph.bench.servers import Client, started

SERVER = ROOT.parent / "shared" / "rivals" / "bin" / "llama-server"
SAME_ANSWER = 4  # tokens; every server is told the same, so that the prompts are the same


def prompts(ids: list[int], cleared: list[int], args: argparse.Namespace) -> Iterator[list[int]]:
    """Of each turn. What the agent says is text, too, so that it doesn't depend on who answered."""
    size = args.result + args.say
    pieces = [ids[200 + i * size : 200 + (i + 1) * size] for i in range(args.turns)]
    for turn in range(args.turns):
        prompt = ids[:200]
        for i, piece in enumerate(pieces[: turn + 1]):
            said, result = piece[: args.say], piece[args.say :]
            prompt = [*prompt, *said, *(result if i > turn - args.keep else cleared)]
        yield prompt


def n_staying(texts: list[list[int]], args: argparse.Namespace, n_cleared: int) -> int:
    """Tokens of prompts that the prompts before them had, too; the first prompt has none."""
    n_new = args.say + args.result
    return sum(
        len(text) - n_new - (n_cleared if turn >= args.keep else 0) for turn, text in enumerate(texts) if turn
    )


def converse(client: Client, texts: list[list[int]]) -> dict[str, Any]:
    n_decoded, firsts = 0, []
    for turn, prompt in enumerate(texts):
        begin, first, kept = time.perf_counter(), 0.0, 0
        for event in client.complete(prompt, SAME_ANSWER):
            first = first or time.perf_counter() - begin
            kept = event.get("timings", {}).get("cache_n", kept)
        if turn:
            n_decoded += len(prompt) - kept
            firsts.append(first)
    return {"decoded": n_decoded, "first_ms": round(1e3 * statistics.median(firsts), 1)}


def servers(args: argparse.Namespace, arch: str, n_ctx: int) -> Iterator[tuple[str, list[str]]]:
    options = ["-m", str(args.model), "-c", str(n_ctx), "-np", "1", "-t", str(args.threads)]
    options += ["--override-kv", f"{arch}.context_length=int:{n_ctx}"]  # or a small model's prompts don't fit
    ours = [sys.executable, "-m", "pykvgraph", "serve", *options]
    yield "pykvgraph exact", ours
    yield "pykvgraph approximate", [*ours, "--cache-edit", "approximate"]
    yield "llama-server", [str(args.server), *options]
    for n in ("64", "256"):
        yield f"llama-server --cache-reuse {n}", [str(args.server), *options, "--cache-reuse", n]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    real = ROOT / "build" / "real"
    parser.add_argument("--model", type=Path, default=real / "smollm2.gguf", help="(default: %(default)s)")
    parser.add_argument("--text", type=Path, default=real / "news.txt", help="(default: %(default)s)")
    parser.add_argument("--server", type=Path, default=SERVER, help="llama-server (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--result", type=int, default=500, help="tokens of a tool's result")
    parser.add_argument("--say", type=int, default=40, help="tokens of what the agent says")
    parser.add_argument("--keep", type=int, default=3, help="results that stay")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "edits.json", help="what was measured")
    args = parser.parse_args()
    with kvg.Model(args.model, device="cpu") as model:
        tokenizer = model.tokenizer
        ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
        while len(ids) < 200 + args.turns * (args.result + args.say):
            ids += ids
        cleared = tokenizer.encode("\n[cleared]\n", add_special=False)
        texts = list(prompts(ids, cleared, args))
        n_ctx = -(-2 * max(map(len, texts)) // 256) * 256
        n_prompt = sum(map(len, texts[1:]))
        n_stay = n_staying(texts, args, len(cleared))
        report: dict[str, Any] = {"machine": machine(), "prompt_tokens": n_prompt, "staying_tokens": n_stay}
        report |= {"model": args.model.name, "turns": args.turns, "result": args.result, "keep": args.keep}
        print(f"{n_prompt} prompt tokens, {n_stay} of which the prompt before had, too")
        print(f"{'server':<32}{'decoded':>9}{'again':>8}{'first ms':>10}")
        for name, command in servers(args, model.arch, n_ctx):
            with args.json.with_suffix(".log").open("ab") as log, started(command, log) as port:
                found = report[name] = converse(Client(port, tokenizer), texts)
            found["again"] = round((found["decoded"] - (n_prompt - n_stay)) / n_stay, 4)
            print(f"{name:<32}{found['decoded']:>9}{found['again']:>8.1%}{found['first_ms']:>10}", flush=True)
    least = min(each["decoded"] for name, each in report.items() if name.startswith("llama-server"))
    share = report["pykvgraph approximate"]["decoded"] / least
    print(f"approximate decodes {share:.2f} of llama-server's least")
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

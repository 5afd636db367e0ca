"""Answers many prompts at once, with progress: a line of JSON for each, in the order of the prompts.

    seq -f "Story number %g: Once upon a time" 1000 > prompts.txt
    python examples/batch.py -m model.gguf -f prompts.txt > answers.jsonl

The engine decodes -np texts together, and lets the next one in as soon as one has ended. What prompts begin
with alike is decoded once. `pykvgraph batch` does the same for files of any length, and goes on after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pykvgraph as kvg


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers many prompts at once.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("-f", metavar="FILE", required=True, help="a text file: a prompt in each line")
    parser.add_argument("-n", type=int, default=32, help="most tokens of an answer (default: 32)")
    parser.add_argument("-np", type=int, default=8, help="texts at a time (default: 8)")
    parser.add_argument("-t", type=int, help="CPU threads (default: all, one for a tiny model)")
    args = parser.parse_args()
    prompts = [line for line in Path(args.f).read_text(encoding="utf-8").splitlines() if line.strip()]
    threads = {"n_threads": args.t, "n_threads_batch": args.t}
    with kvg.Model(args.m) as model, kvg.Engine(model, n_seq_max=args.np, **threads) as engine:
        answer(engine, prompts, kvg.SamplingParams(max_tokens=args.n))


def answer(engine: kvg.Engine, prompts: list[str], params: kvg.SamplingParams) -> None:
    begin = time.perf_counter()
    requests = [engine.submit(prompt, params) for prompt in prompts]  # returns at once
    for n_done, (prompt, request) in enumerate(zip(prompts, requests, strict=True), 1):
        completion = request.result()  # the engine's thread goes on with the others
        print(json.dumps({"prompt": prompt, "text": completion.text, "n_cached": completion.n_cached}))
        tell(f"{n_done} of {len(prompts)} answers, {n_done / (time.perf_counter() - begin):.1f} a second")
    stats = engine.stats()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    shared = f"{stats.prefix_hit_tokens} of {stats.prompt_tokens} prompt tokens were in the cache"
    print(f"{len(prompts)} answers in {stats.steps} steps; {shared}", file=sys.stderr)


def tell(text: str) -> None:
    """On a terminal, over what was told before."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (kvg.KVGraphError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"batch.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

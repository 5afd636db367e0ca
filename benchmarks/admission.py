"""How many requests run at a time in a small cache: the walk over who ends when, and the sum of all.

    python benchmarks/admission.py --model model.gguf

Requests come at once; most want few tokens, and few want many (Zipf). By turns, the engine admits them by its
walk, and by the sum of all cells that everybody may take. With --json a line for each run is appended.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from shapes import STORIES

import pykvgraph as kvg
from pykvgraph.engine import admission

N_SEQ_MAX = 16
LEAST, MOST = 8, 400  # tokens to say


def lengths(n: int, seed: int) -> list[tuple[int, int]]:
    """Tokens of the prompt, and to say: a share of 1 / k of the requests want more than k times LEAST."""
    rng = np.random.default_rng(seed)
    wanted = np.minimum(LEAST / (1 - rng.random(n)), MOST).astype(int)
    return [(int(rng.integers(8, 64)), int(each)) for each in wanted]


def run(model: kvg.Model, n_ctx: int, asked: list[tuple[int, int]]) -> dict[str, Any]:
    """Until all have ended."""
    rng = np.random.default_rng(1)
    end = model.tokenizer.eos if model.has_tokenizer else None
    bias = {} if end is None else {end: -math.inf}
    with kvg.Engine(model, n_ctx=n_ctx, n_seq_max=N_SEQ_MAX, background=False, n_threads=2) as engine:
        requests = [
            engine.submit(
                rng.integers(3, model.n_vocab, n_prompt), kvg.SamplingParams(max_tokens=n, logit_bias=bias)
            )
            for n_prompt, n in asked
        ]
        running, begin = [], time.perf_counter()
        while engine.step():
            running.append(engine.stats().n_running)
        seconds = time.perf_counter() - begin
        waited = [request.result().waited for request in requests]
        stats = engine.stats()
    return {
        "tokens_per_second": round(sum(n for _, n in asked) / seconds, 1),
        "running": round(statistics.mean(running), 2),
        "steps": stats.steps,
        "waited_mean": round(statistics.mean(waited), 2),
        "preempted": stats.n_preempted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=STORIES)
    parser.add_argument("--n-ctx", type=int, default=768)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths in the first round")
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    args = parser.parse_args()
    with kvg.Model(args.model, device="cpu") as model:
        for seed in range(args.seed, args.seed + args.rounds):
            asked = lengths(args.requests, seed)
            for rule in ("walk", "sum") if seed % 2 else ("sum", "walk"):
                never = mock.patch.object(
                    admission.Admission, "_steps_to_read", lambda *_: admission._NEVER
                )  # so that nobody is known to have ended before the others
                with never if rule == "sum" else mock.patch.dict({}):
                    found = {"rule": rule, "seed": seed, **run(model, args.n_ctx, asked)}
                print(json.dumps(found), flush=True)
                if args.json:
                    with args.json.open("a", encoding="utf-8") as file:
                        file.write(
                            json.dumps({"model": args.model.name, "n_ctx": args.n_ctx, **found}) + "\n"
                        )


if __name__ == "__main__":
    main()

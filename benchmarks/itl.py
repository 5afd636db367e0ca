"""What a long prompt costs those who talk, when max_itl is given: the gaps of eight talkers.

    python benchmarks/itl.py --model model.gguf --depths 0,9000,19000 --steps 200

A gap is the time from one token of a text to its next: the time of a step. First the talkers are alone, and
max_itl is set to twice their p95. Then a prompt of 20,000 tokens comes, of which the cache has as many
already as --depths says, so that it goes on from there; with --steps 0 until it is decoded.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
from shapes import STORIES

import pykvgraph as kvg
from pykvgraph.engine.token_budget import TokenBudget

N_TALKERS = 8
N_PROMPT = 20_000
N_CTX = 32_768
N_ALONE = 300  # steps


def gaps(engine: kvg.Engine, n_steps: int, request: kvg.Request | None = None) -> list[float]:
    """Seconds of each step: n_steps, or as many as it takes until the request has ended."""
    took: list[float] = []
    while (not n_steps or len(took) < n_steps) and not (request and request.done):
        begin = time.perf_counter()
        engine.step()
        took.append(time.perf_counter() - begin)
    return took


def show(name: str, took: list[float], max_itl: float) -> None:
    """A row: quantiles in milliseconds, and the share of steps that lasted longer than max_itl."""
    p50, p95, most = (np.quantile(took, each) * 1e3 for each in (0.5, 0.95, 1))
    late = np.mean(np.array(took) > max_itl)
    print(
        f"{name:24} {len(took):6} steps  p50 {p50:7.2f}  p95 {p95:7.2f}  longest {most:7.2f} ms  "
        f"p95 / alone {p95 / max_itl / 5e2:.2f}  late {late:.3f}",
        flush=True,
    )


def measure(engine: kvg.Engine, depths: list[int], n_steps: int) -> None:
    """The talkers alone, then beside the prompt at each depth, then alone again."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, engine.model.n_vocab, N_PROMPT).tolist()
    end = engine.model.tokenizer.eos if engine.model.has_tokenizer else None
    talks = kvg.SamplingParams(max_tokens=1400, logit_bias={} if end is None else {end: -math.inf})
    for depth in depths:
        if depth:
            engine.submit(prompt[:depth], kvg.SamplingParams(max_tokens=1)).result()
        talkers = [engine.submit(prompt[i : i + 32], talks) for i in range(N_TALKERS)]
        engine.step()
        alone = gaps(engine, N_ALONE)
        max_itl = 2 * float(np.quantile(alone, 0.95))
        engine._loop.stepper._budget = TokenBudget(max_itl, 64, 64)
        show("alone", alone, max_itl)
        gaps(engine, 20)  # the budget learns what a step takes
        before = engine.stats().decoded_tokens
        long = engine.submit(prompt, kvg.SamplingParams(max_tokens=1))
        beside = gaps(engine, n_steps, long)
        n = engine.stats().decoded_tokens - before - N_TALKERS * len(beside)
        show(f"from {depth} to {depth + n}", beside, max_itl)
        for each in (*talkers, long):
            each.cancel()
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=STORIES)
    parser.add_argument("--depths", default="0,9000,19000", help="tokens of the prompt in the cache")
    parser.add_argument("--steps", type=int, default=200, help="beside the prompt, at each depth; 0: all")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with (
        kvg.Model(args.model, device="cpu") as model,
        kvg.Engine(
            model, n_ctx=N_CTX, n_seq_max=N_TALKERS + 1, background=False, n_threads=args.threads
        ) as engine,
    ):
        print(f"{args.model.name}, {args.threads} threads")
        measure(engine, [int(each) for each in args.depths.split(",")], args.steps)


if __name__ == "__main__":
    main()

"""What drafts cost and bring: rows beside one, and answers with draft="ngram" and without, by turns.

    python benchmarks/drafts.py --model model.gguf --output benchmarks/results/drafts.json

--model: the one that rows are decoded on, 1 and 1 + 4 of them behind 256 tokens. The answers are those of
the embedded model: one repeats a passage of its prompt, one is drawn so that it repeats nothing. Each is
asked for by turns of two engines, in which the prompt is; medians of tokens a second from the first one on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from shapes import STORIES

import pykvgraph as kvg
from pykvgraph.models import embedded_model

ROWS = (1, 2, 3, 5, 9, 17)
DEPTH = 256
PASSAGE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 12
N_SAID = 400


def seconds_of_rows(model: kvg.Model, n_threads: int, n_rounds: int) -> dict[int, float]:
    """The median time of a decode with so many rows, and of removing them; ten at a time, by turns."""
    took: dict[int, list[float]] = {n: [] for n in ROWS}
    with kvg.Context(model, n_ctx=512, n_threads=n_threads) as ctx:
        batch = kvg.Batch()
        batch.extend([token % 200 + 3 for token in range(DEPTH)], 0)
        ctx.decode(batch)
        for _ in range(n_rounds):
            for n in ROWS:
                batch.clear()
                batch.extend(range(5, 5 + n), DEPTH, logits="all")
                for i in range(5):
                    begin = time.perf_counter()
                    ctx.decode(batch, scores=True)
                    ctx.kv.seq_rm(0, DEPTH, -1)
                    if i:  # the first one makes the graph
                        took[n].append(time.perf_counter() - begin)
    return {n: statistics.median(each) for n, each in took.items()}


def rates(model: kvg.Model, params: kvg.SamplingParams, n_threads: int, n_rounds: int) -> dict[str, Any]:
    """Tokens a second without and with drafts."""
    drafts = (None, "ngram")
    engines = [
        kvg.Engine(
            model,
            n_ctx=4096,
            n_seq_max=1,
            n_threads=n_threads,
            background=False,
            draft=draft,  # type: ignore[arg-type]
        )
        for draft in drafts
    ]
    found: list[list[float]] = [[], []]
    tokens = []
    for i in range(n_rounds + 1):
        for engine, each in zip(engines, found, strict=True):
            said = engine.submit(PASSAGE, params).result()
            if i:  # the first one decodes the prompt
                each.append((said.n_said - 1) / (said.seconds - said.ttft))
            tokens.append(said.tokens)
    plain, drafted = map(statistics.median, found)
    stats = engines[1].stats()
    for engine in engines:
        engine.close()
    return {
        "tokens_per_second": plain,
        "with_drafts": drafted,
        "ratio": drafted / plain,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        # by rounding alone: a row of a larger batch is rounded otherwise, with drafts or beside other texts
        "same_tokens": sum(each == tokens[-1] for each in tokens) / len(tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=STORIES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with kvg.Model(args.model, device="cpu") as model:
        rows = seconds_of_rows(model, args.threads, args.rounds)
        measured: dict[str, Any] = {"model": args.model.name, "n_params": model.n_params}
    measured["milliseconds_of_rows"] = {n: round(each * 1e3, 3) for n, each in rows.items()}
    measured["five_rows_by_one"] = rows[5] / rows[1]
    with kvg.Model(embedded_model(), device="cpu") as model:
        repeats = kvg.SamplingParams(max_tokens=N_SAID)
        plain = kvg.SamplingParams(max_tokens=N_SAID, temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
        measured["a_passage"] = rates(model, repeats, 1, args.rounds)
        measured["no_repeats"] = rates(model, plain, 1, args.rounds)
    text = json.dumps(measured, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()

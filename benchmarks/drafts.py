"""What drafts cost and bring: rows beside one, and answers with draft="ngram" and without, by turns.

    python benchmarks/drafts.py --model model.gguf --output benchmarks/results/drafts.json

--model: the one that rows are decoded on, 1 and 1 + 4 of them behind 256 tokens. The answers are those of
the embedded model: one repeats a passage of its prompt, one is drawn so that it repeats nothing. Each is
asked for by turns of two engines, in which the prompt is; medians of tokens a second from the first one on.

--head: only what the draft head (MTP) of such a file brings, greedy, on one thread, with K and V in F32: in
generate(draft="mtp") with drafts of at most --draft-max tokens, and in an engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from shapes import STORIES

import pykvgraph as kvg
from pykvgraph.models import embedded_model

ROWS = (1, 2, 3, 5, 9, 17)
DEPTH = 256
PASSAGE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 12
N_SAID = 400
BEGINNINGS = ("Once upon a time", "The dog was", "Lily and Ben went to the", "One day, a big bear")
N_TOLD = 200
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}


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


def engine_of(
    model: kvg.Model, n_threads: int, draft: Literal["ngram", "mtp"] | None, **more: Any
) -> kvg.Engine:
    return kvg.Engine(
        model, n_ctx=4096, n_seq_max=1, n_threads=n_threads, background=False, draft=draft, **more
    )


def rates(
    plain: kvg.Engine,
    drafting: kvg.Engine,
    prompts: Sequence[str],
    params: kvg.SamplingParams,
    n_rounds: int,
) -> dict[str, Any]:
    """Tokens a second without and with drafts, of all prompts; closes the engines."""
    engines = (plain, drafting)
    found: list[list[float]] = [[], []]
    tokens = []
    for i in range(n_rounds + 1):
        for engine, each in zip(engines, found, strict=True):
            answers = [engine.submit(prompt, params).result() for prompt in prompts]
            if i:  # the first one decodes the prompt
                seconds = sum(said.seconds - said.ttft for said in answers)
                each.append(sum(said.n_said - 1 for said in answers) / seconds)
            tokens.append([said.tokens for said in answers])
    without, with_drafts = map(statistics.median, found)
    stats = drafting.stats()
    for engine in engines:
        engine.close()
    return {
        "tokens_per_second": without,
        "with_drafts": with_drafts,
        "ratio": with_drafts / without,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        # by rounding alone: a row of a larger batch is rounded otherwise, with drafts or beside other texts
        "same_tokens": sum(each == tokens[-1] for each in tokens) / len(tokens),
    }


def of_head(path: Path, draft_max: int, n_rounds: int) -> dict[str, Any]:
    """What drafts by the model's own head bring."""
    took: dict[bool, list[float]] = {False: [], True: []}
    said: dict[bool, list[int]] = {}
    with kvg.Model(path, device="cpu") as plain, kvg.Model(path, device="cpu", draft_heads=True) as model:
        with kvg.Context(model, n_ctx=512, n_threads=1, **F32) as ctx:
            for i in range(n_rounds + 1):
                for drafts, times in took.items():
                    more: dict[str, Any] = {"draft": "mtp", "draft_max": draft_max} if drafts else {}
                    said[drafts], begin = [], time.perf_counter()
                    for beginning in BEGINNINGS:
                        ctx.kv.clear()
                        pieces = kvg.generate(ctx, beginning, max_tokens=N_TOLD, temperature=0.0, **more)
                        said[drafts] += [piece.token for piece in pieces]
                    if i:  # the first round makes the graphs
                        times.append(time.perf_counter() - begin)
                if said[False] != said[True]:
                    raise SystemExit("with drafts the text is another one")
        seconds = {drafts: statistics.median(times) for drafts, times in took.items()}
        greedy = kvg.SamplingParams(max_tokens=N_TOLD, temperature=0.0)
        engines = (
            engine_of(plain, 1, None, **F32),
            engine_of(model, 1, "mtp", draft_max=draft_max, **F32),
        )
        return {
            "model": path.name,
            "n_params": model.n_params,
            "generate": {
                "tokens_per_second": len(said[False]) / seconds[False],
                "with_drafts": len(said[True]) / seconds[True],
                "ratio": seconds[False] / seconds[True],
            },
            "engine": rates(*engines, BEGINNINGS, greedy, n_rounds),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=STORIES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--head", type=Path, help="a file with a draft head")
    parser.add_argument("--draft-max", type=int, default=2, help="[2]")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.head:
        report(of_head(args.head, args.draft_max, args.rounds), args.output)
        return
    with kvg.Model(args.model, device="cpu") as model:
        rows = seconds_of_rows(model, args.threads, args.rounds)
        measured: dict[str, Any] = {"model": args.model.name, "n_params": model.n_params}
    measured["milliseconds_of_rows"] = {n: round(each * 1e3, 3) for n, each in rows.items()}
    measured["five_rows_by_one"] = rows[5] / rows[1]
    with kvg.Model(embedded_model(), device="cpu") as model:
        repeats = kvg.SamplingParams(max_tokens=N_SAID)
        plain = kvg.SamplingParams(max_tokens=N_SAID, temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
        for name, params in (("a_passage", repeats), ("no_repeats", plain)):
            engines = engine_of(model, 1, None), engine_of(model, 1, "ngram")
            measured[name] = rates(*engines, [PASSAGE], params, args.rounds)
    report(measured, args.output)


def report(measured: dict[str, Any], output: Path | None) -> None:
    text = json.dumps(measured, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()

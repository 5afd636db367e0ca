"""Whether a server says the same whoever else asks: each prompt alone, then all at once, then alone again.

    python benchmarks/same_answers.py --model model.gguf --text text.txt --vs llama-server

Prompts are parts of the text, most with the same beginning. Of each way it prints how many answers have the
same tokens as alone at first, and how many of their log probabilities are the same floats.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import pykvgraph as kvg
from pykvgraph.bench.servers import Client, started

N_PROMPTS = 24
N_SHARED = 700
N_ANSWER = 48
Answer = tuple[list[int], list[float]]  # tokens, and the log probability of each


def prompts_of(ids: Sequence[int]) -> list[list[int]]:
    """A beginning of some length from the shared one, then tokens of its own."""
    rng = np.random.default_rng(0)
    prompts = []
    for i in range(N_PROMPTS):
        own = N_SHARED + 80 * i
        prompts.append([*ids[: int(rng.integers(1, N_SHARED))], *ids[own : own + int(rng.integers(1, 300))]])
    return prompts


def answer(client: Client, prompt: Sequence[int]) -> Answer:
    """Greedy."""
    tokens: list[int] = []
    chances: list[float] = []
    for event in client.complete(prompt, N_ANSWER):
        tokens += event["tokens"]
        chances += [float(each["logprob"]) for each in event.get("completion_probabilities", [])]
    return tokens, chances


def compare(name: str, found: Sequence[Answer], alone: Sequence[Answer]) -> None:
    """A row of the table."""
    texts = sum(a[0] == b[0] for a, b in zip(found, alone, strict=True))
    pairs = [
        pair
        for a, b in zip(found, alone, strict=True)
        for pair in zip(a[1], b[1], strict=True)
        if a[0] == b[0]
    ]
    same = sum(a == b for a, b in pairs)
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    print(
        f"  {name:28} {texts:2} of {len(alone)} texts, {same:4} of {len(pairs)} log probabilities of these; "
        f"others by up to {worst:.2g}",
        flush=True,
    )


def measure(command: Sequence[str], model: kvg.Model, prompts: Sequence[Sequence[int]]) -> None:
    """One server: its table."""
    with tempfile.TemporaryFile() as log, started(command, log) as port:
        client = Client(port, model.tokenizer, {"n_probs": 1})
        afresh = Client(port, model.tokenizer, {"n_probs": 1, "cache_prompt": False})
        alone = [answer(afresh, prompt) for prompt in prompts]
        compare("alone, once more", [answer(afresh, prompt) for prompt in prompts], alone)
        compare("alone, with shared prefixes", [answer(client, prompt) for prompt in prompts], alone)
        with ThreadPoolExecutor(8) as pool:
            compare("eight at a time", list(pool.map(lambda prompt: answer(client, prompt), prompts)), alone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--vs", action="append", default=[], help="a program that takes llama-server's options"
    )
    parser.add_argument("-c", "--ctx-size", default="8192")
    args = parser.parse_args()
    with kvg.Model(args.model, device="cpu") as model:
        prompts = prompts_of(model.tokenizer.encode(args.text.read_text(encoding="utf-8")[:100_000]))
        for program in (["pykvgraph", "serve"], *([each] for each in args.vs)):
            command = [
                *program,
                "-m",
                str(args.model),
                "-c",
                args.ctx_size,
                "-np",
                "8",
                "-t",
                "2",
                "-ngl",
                "0",
            ]
            print(" ".join(program), flush=True)
            measure(command, model, prompts)


if __name__ == "__main__":
    main()

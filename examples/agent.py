"""An agent whose old tool results are cleared: what its turns cost, decoded exactly and edited in the cache.

    python examples/agent.py -m model.gguf
    python examples/agent.py -m model.gguf -f notes.txt --turns 20 --keep 3

Each turn the model says something, and then a tool gives it a part of a text (-f). Of the results the last
--keep stay in the prompt; each older one becomes a short note. Behind a note all tokens have moved: with
edit="exact" they are decoded again; with edit="approximate" the cache moves them, and 32 tokens behind the
note are decoded again (docs/editing.md). The same conversation is run both ways.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import pykvgraph as kvg

STORY = """Once upon a time, there was a girl named Lily. She lived in a small house near a big forest.
Lily had a brown dog named Max and a friend named Tom. Every day they played in the garden with a red ball.
One day, the ball rolled into the forest. Lily was sad. Tom wanted to go home, but Max ran into the trees.
They followed him and saw a big bear. The bear had the red ball. It was sad too, because it had no friends.
Lily said, "You can play with us." The bear smiled. They all played together until the sun went down.
"""
SYSTEM = "You read a long text with a tool, one part at a time, and take notes.\n"
CLEARED = "\nResult: (cleared)\nNote:"
RESULT = "\nResult: {}\nNote:"


class Cost(NamedTuple):
    """Of all turns. n_prompt: tokens of prompts. n_cached, n_edited: of these from the cache, and edited."""

    n_prompt: int
    n_cached: int
    n_edited: int
    n_decoded: int
    seconds_to_first: float


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent whose old tool results are cleared.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("-f", metavar="FILE", help="the text that the tool reads (default: a short story)")
    parser.add_argument("--turns", type=int, default=12, help="of the agent (default: %(default)s)")
    parser.add_argument("--keep", type=int, default=3, help="results that stay (default: %(default)s)")
    parser.add_argument("--part", type=int, default=400, help="tokens of a result (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer (default: %(default)s)")
    parser.add_argument("-ngl", type=int, default=-1, help="layers on devices (default: all)")
    args = parser.parse_args()
    text = Path(args.f).read_text(encoding="utf-8") if args.f else STORY
    with kvg.Model(args.m, n_gpu_layers=args.ngl) as model:
        results = parts(model, text, args.turns, args.part)
        n_ctx = args.turns * (args.max_tokens + 40) + (args.keep + 2) * (args.part + 40)
        modes: tuple[Literal["exact", "approximate"], ...] = ("exact", "approximate")
        for edit in modes:
            with kvg.Engine(model, n_ctx=2 * n_ctx, n_seq_max=1) as engine:
                show(edit, run(engine, results, edit, args))


def parts(model: kvg.Model, text: str, n: int, n_tokens: int) -> list[list[int]]:
    """What the tool gives each time: the next tokens of the text, which begins again at its end."""
    ids = model.tokenizer.encode(text, add_special=False)
    while len(ids) < n * n_tokens:
        ids += ids
    return [ids[i * n_tokens : (i + 1) * n_tokens] for i in range(n)]


def run(
    engine: kvg.Engine,
    results: list[list[int]],
    edit: Literal["exact", "approximate"],
    args: argparse.Namespace,
) -> Cost:
    params = kvg.SamplingParams(max_tokens=args.max_tokens)
    before, behind = (words(engine, part) for part in RESULT.split("{}"))
    cleared, notes = words(engine, CLEARED), list[list[int]]()
    n_prompt = n_cached = n_edited = 0
    seconds = 0.0
    for turn, result in enumerate(results):
        prompt = engine.model.tokenizer.encode(SYSTEM)
        for i, note in enumerate(notes):
            shown = [*before, *results[i], *behind] if i >= turn + 1 - args.keep else cleared
            prompt += [*shown, *note]
        prompt += [*before, *result, *behind]
        told = engine.submit(prompt, params, edit=edit, session="agent").result()
        notes.append(list(told.tokens))
        n_prompt, n_cached = n_prompt + told.n_prompt, n_cached + told.n_cached
        n_edited, seconds = n_edited + told.cache.edited, seconds + told.ttft
    return Cost(n_prompt, n_cached, n_edited, engine.stats().decoded_tokens, seconds)


def words(engine: kvg.Engine, text: str) -> list[int]:
    """A text that goes on another one."""
    return engine.model.tokenizer.encode(text, add_special=False, add_space_prefix=False)


def show(edit: str, cost: Cost) -> None:
    share = cost.n_cached / max(cost.n_prompt, 1)
    print(f"{edit}: {share:.1%} of {cost.n_prompt} prompt tokens were in the cache, {cost.n_edited} edited")
    print(f"    {cost.n_decoded} tokens decoded; {cost.seconds_to_first:.2f} s to all first tokens")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (kvg.KVGraphError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"agent.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

"""Agents that share one long context: it is in the cache once, whatever they make of it.

    python examples/agents.py -m model.gguf
    python examples/agents.py -m model.gguf -f document.txt -n 4

Each agent reads the same text with a question of its own behind it, and drafts -n answers: forks, which share
the cells of text and question. Then each goes on from its first draft. The engine finds by itself how much of
a prompt the cache has. What an answer took is told behind it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pykvgraph as kvg

CONTEXT = """Once upon a time, there was a girl named Lily. She lived in a small house near a big forest.
Lily had a brown dog named Max and a friend named Tom. Every day they played in the garden with a red ball.
One day, the ball rolled into the forest. Lily was sad. Tom wanted to go home, but Max ran into the trees.
They followed him and saw a big bear. The bear had the red ball. It was sad too, because it had no friends.
Lily said, "You can play with us." The bear smiled. They all played together until the sun went down.
"""
AGENTS = {"Lily": "Then Lily said,", "Tom": "Then Tom said,", "the bear": "Then the bear said,"}
FOLLOW_UP = " And then"
MAX_DEFAULT_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description="Agents that share one long context.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("-f", metavar="FILE", help="the text that they share (default: a short story)")
    parser.add_argument("-n", type=int, default=3, help="drafts of each agent (default: 3)")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_DEFAULT_TOKENS, help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the sampler (default: 1)")
    args = parser.parse_args()
    text = Path(args.f).read_text(encoding="utf-8") if args.f else CONTEXT
    with kvg.Model(args.m) as model:
        shared = model.tokenizer.encode(text)
        n_seq_max = len(AGENTS) * args.n
        # the shared text once, and what each draft says in two answers
        n_ctx = len(shared) + n_seq_max * (2 * args.max_tokens + 64)
        with kvg.Engine(model, n_ctx=n_ctx, n_seq_max=n_seq_max) as engine:
            print(f"the shared text: {len(shared)} tokens")
            talk(engine, shared, args)


def talk(engine: kvg.Engine, shared: list[int], args: argparse.Namespace) -> None:
    params = kvg.SamplingParams(max_tokens=args.max_tokens, temperature=0.8, n=args.n, seed=args.seed)
    once = kvg.SamplingParams(max_tokens=args.max_tokens)
    asked = {name: shared + words(engine, question) for name, question in AGENTS.items()}
    drafts = {name: engine.submit(ids, params) for name, ids in asked.items()}
    n_tokens = 0  # of all texts, as if nothing was shared
    follow_ups = {}
    for name, request in drafts.items():
        found = request.results()
        n_tokens += sum(each.n_prompt + len(each.tokens) for each in found)
        for i, completion in enumerate(found, 1):
            show(f"{name}, draft {i}", completion)
        ids = [*asked[name], *found[0].tokens, *words(engine, FOLLOW_UP)]
        follow_ups[name] = engine.submit(ids, once)
    for name, request in follow_ups.items():
        completion = request.result()
        n_tokens += completion.n_prompt + len(completion.tokens)
        show(f"{name}, later", completion)
    print(f"all texts: {n_tokens} tokens in {engine.stats().cells_used[0]} cells")


def words(engine: kvg.Engine, text: str) -> list[int]:
    """A text that goes on another one."""
    return engine.model.tokenizer.encode(text, add_special=False, add_space_prefix=False)


def show(title: str, completion: kvg.Completion) -> None:
    text = " ".join(completion.text.split())
    print(f"{title}: {text}")
    print(f"    {completion.n_cached} of {completion.n_prompt} prompt tokens were in the cache")


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (kvg.KVGraphError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"agents.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

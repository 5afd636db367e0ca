"""A hundred questions about ten documents that are read once: what they cost, and how many answers are right.

    python examples/documents.py -m model.gguf -f news.txt
    python examples/documents.py -m model.gguf -f news.txt --repair 0 8 32 128

Each document is a part of a text (-f) with a fact in it. A question asks for the facts of two documents, in
any order. Full: the prompt is the system's words, two documents and the question, all decoded. Linked: the
system's words and each document were read once and are held. The first of the two goes on from the system's
words, behind which it was read; the second one is moved behind it, and its first --repair tokens are decoded
again there (docs/editing.md). Then only the question is decoded.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pykvgraph as kvg

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 200
SYSTEM = "You read documents and answer questions about them.\n"
THINGS = (
    *("height of the tower", "age of the tree", "price of the car", "length of the bridge"),
    *("weight of the whale", "depth of the lake", "code of the safe", "number of the train"),
    *("size of the army", "cost of the journey", "width of the river", "speed of the rocket"),
)
N_ANSWER = 24  # tokens


class Fact(NamedTuple):
    """What is told, and its value."""

    thing: str
    value: str


class Answers(NamedTuple):
    """said: to all questions. n_decoded: tokens of prompts."""

    said: list[str]
    n_decoded: int


class Reader:
    """Answers questions about documents, of which it has the tokens. texts, facts: one of each document."""

    def __init__(self, ctx: kvg.Context, texts: list[str], facts: list[Fact]) -> None:
        self.facts = facts
        self._ctx = ctx
        self._system = ctx.model.tokenizer.encode(SYSTEM)
        self._documents = [self._tokens(text) for text in texts]

    def fully(self, pairs: list[tuple[int, int]]) -> Answers:
        """Every prompt is decoded as a whole."""
        text, said, n_decoded = kvg.Sequence(self._ctx), list[str](), 0
        for a, b in pairs:
            text.go_back(0)
            prompt = [*self._system, *self._documents[a], *self._documents[b]]
            text.set(prompt)
            question = self._question(a, b)
            said.append(self._answer(question))
            n_decoded += len(prompt) + len(question)
        text.go_back(0)
        return Answers(said, n_decoded)

    def linked(self, pairs: list[tuple[int, int]], repair: int) -> Answers:
        """Documents are read once."""
        read = [self._ctx.read(ids, behind=self._system) for ids in self._documents]
        n_decoded = sum(len(document) + len(document.behind) for document in read)
        text, said = kvg.Sequence(self._ctx), list[str]()
        text.set(self._system)
        n_decoded += len(self._system)
        for a, b in pairs:
            text.go_back(len(self._system))
            text.link(read[a])  # exact: it was read behind the same
            text.link(read[b], repair=repair)
            question = self._question(a, b)
            said.append(self._answer(question))
            n_decoded += min(repair, len(read[b])) + len(question)
        text.go_back(0)
        for document in read:
            document.release()
        return Answers(said, n_decoded)

    def share_right(self, pairs: list[tuple[int, int]], said: list[str]) -> float:
        """Of the values that were asked for, those that an answer has."""
        asked = [(self.facts[i].value, text) for pair, text in zip(pairs, said, strict=True) for i in pair]
        return sum(value in text for value, text in asked) / len(asked)

    def _question(self, a: int, b: int) -> list[int]:
        first, second = self.facts[a].thing, self.facts[b].thing
        return self._tokens(
            f"\nQuestion: What is the {first}, and what is the {second}?\nAnswer: The {first} is"
        )

    def _answer(self, question: list[int]) -> str:
        """Of sequence 0, which has the documents."""
        return "".join(piece.text for piece in kvg.generate(self._ctx, question, max_tokens=N_ANSWER))

    def _tokens(self, text: str) -> list[int]:
        """Of a text that goes on another one."""
        return self._ctx.model.tokenizer.encode(text, add_special=False, add_space_prefix=False)


def main() -> None:
    args = parse_arguments()
    rng = random.Random(args.seed)
    text = Path(args.f).read_text(encoding="utf-8") if args.f else NOISE
    facts = [Fact(thing, str(rng.randint(10000, 99999))) for thing in rng.sample(THINGS, args.documents)]
    pairs = [(a, b) for a, b in (rng.sample(range(args.documents), 2) for _ in range(args.questions))]
    with kvg.Model(args.m, n_gpu_layers=args.ngl) as model:
        texts = documents(model.tokenizer, text, facts, args.part, rng)
        n_cells = (args.documents + 4) * (args.part + 64) + 256  # those that are held, and two texts' parts
        with kvg.Context(model, n_ctx=n_cells, n_batch=256, n_seq_max=2, n_threads=args.t) as ctx:
            reader = Reader(ctx, texts, facts)
            full = reader.fully(pairs)
            show("full", full, full, reader.share_right(pairs, full.said))
            for repair in args.repair:
                linked = reader.linked(pairs, repair)
                show(f"linked, repair={repair}", linked, full, reader.share_right(pairs, linked.said))


def documents(
    tokenizer: kvg.Tokenizer, text: str, facts: list[Fact], n_tokens: int, rng: random.Random
) -> list[str]:
    """The next sentences of a text with a fact between them, one document for each fact."""
    sentences = [each for each in re.split(r"(?<=[.!?])\s+", text) if each]
    found, at = [], 0
    for number, fact in enumerate(facts, 1):
        told = f"The {fact.thing} is {fact.value}. Remember it: the {fact.thing} is {fact.value}."
        head, parts, n = f"\nDocument {number}:", [told], 0
        while n < n_tokens:
            parts.append(sentences[at % len(sentences)])
            n, at = len(tokenizer.encode(" ".join([head, *parts]))), at + 1
        place = rng.randrange(len(parts))
        found.append(" ".join([head, *parts[1 : place + 1], told, *parts[place + 1 :]]))
    return found


def show(name: str, answers: Answers, full: Answers, right: float) -> None:
    share = answers.n_decoded / full.n_decoded
    same = sum(a == b for a, b in zip(answers.said, full.said, strict=True)) / len(full.said)
    print(
        f"{name:<20}{answers.n_decoded:>8} prompt tokens decoded ({share:6.1%}), {right:6.1%} right, "
        f"{same:6.1%} of the answers as full",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Questions about documents that are read once.")
    add = parser.add_argument
    add("-m", metavar="MODEL", required=True, help="a GGUF file")
    add("-f", metavar="FILE", help="the text that documents are parts of (default: the same words, repeated)")
    add("--documents", type=int, default=10, help="how many (default: %(default)s)")
    add("--questions", type=int, default=100, help="how many (default: %(default)s)")
    add("--part", type=int, default=400, help="tokens of a document (default: %(default)s)")
    add("--repair", type=int, nargs="+", default=[32], help="tokens decoded again (default: 32)")
    add("--seed", type=int, default=1, help="of facts and questions (default: %(default)s)")
    add("-t", type=int, help="CPU threads")
    add("-ngl", type=int, default=-1, help="layers on devices (default: all)")
    args = parser.parse_args()
    if not 2 <= args.documents <= len(THINGS):
        parser.error(f"--documents must be from 2 to {len(THINGS)}")
    if min(args.questions, args.part) < 1 or min(args.repair) < 0:
        parser.error("--questions and --part must be at least 1, --repair at least 0")
    return args


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (kvg.KVGraphError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"documents.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

"""Perplexity of a long text in few cells, by each policy, and by choices that nobody can make.

    python benchmarks/bounded_text.py build/real/smollm2.gguf build/real/news.txt [--texts 3] [--cells 2048]

128 cells are forgotten before each 128 tokens. What is scored are the tokens behind the first `cells`.
"seen" chooses by what all of the 128 tokens before attended to, and half as much by those before them;
"later" by the highest mean attention that any later 128 tokens give a cell: both as it is with all cells.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np

import pykvgraph as kvg
from pykvgraph.context import cell_scores
from pykvgraph.context.cell_scores import Floats, Policy, TextCells

N_PART = 128
N_MOST = 64  # tokens that a policy decodes once more


class Reader:
    """Reads a text part by part in a context, and notes -log p of its tokens behind the first n_first."""

    def __init__(self, model: kvg.Model, ids: list[int], n_cells: int, n_first: int) -> None:
        self.ids = ids
        self.n_first = n_first
        self.ctx = kvg.Context(model, n_ctx=n_cells + 2 * N_PART, n_batch=N_PART)
        self.costs: list[float] = []

    def read(self, begin: int, observe: int = 0) -> None:
        """The part that begins there."""
        end = min(begin + N_PART, len(self.ids))
        nexts = range(max(begin + 1, self.n_first), min(end + 1, len(self.ids)))
        first = self.ctx.kv.seq_pos_max(0) + 1 - begin  # gaps may have been closed
        batch = kvg.Batch()
        for i in range(begin, end):
            batch.add(self.ids[i], first + i, logits=i + 1 in nexts)
        self.ctx.decode(batch, scores=bool(nexts), observe=observe)
        if nexts:
            sums = self.ctx.scores().log_sum
            for row, log_sum, i in zip(self.ctx.logits_view(), sums, nexts, strict=True):
                self.costs.append(float(log_sum - row[self.ids[i]]))

    @property
    def cost(self) -> float:
        """The mean of a token."""
        return float(np.mean(self.costs))


def all_cells(model: kvg.Model, ids: list[int], n_first: int) -> tuple[float, Floats]:
    """The mean cost of a token, and what each part attends to: a share for each position, (parts, n)."""
    reader = Reader(model, ids, len(ids), n_first)
    shares = []
    for begin in range(0, len(ids), N_PART):
        reader.read(begin, observe=min(N_PART, len(ids) - begin))
        cells = reader.ctx.kv.cells(0)
        found = np.zeros(len(ids))
        found[cells.pos[cells.pos >= 0]] = reader.ctx.attention()[cells.pos >= 0]
        shares.append(found)
    reader.ctx.close()
    return reader.cost, np.array(shares)


def few_cells(model: kvg.Model, ids: list[int], n_cells: int, policy: str) -> float:
    """The mean cost of a token where a sequence has so many cells."""
    reader = Reader(model, ids, n_cells, n_cells)
    forget = kvg.Forget(n_cells, policy)
    for begin in range(0, len(ids), N_PART):
        forget.make_room(reader.ctx, 0, min(N_PART, len(ids) - begin), ids[max(begin - N_MOST, 0) : begin])
        reader.read(begin)
    reader.ctx.close()
    return reader.cost


def known(shares: Floats) -> dict[str, Policy]:
    """Policies that know what was, and will be, attended to where nothing is forgotten."""
    n_parts = len(shares)

    def seen(text: TextCells) -> Floats:
        n = int(text.positions[-1] + 1) // N_PART
        weights = 0.5 ** (np.arange(n)[::-1] / 2)
        return np.asarray(weights @ shares[:n], np.float64)[text.positions]

    def later(text: TextCells) -> Floats:
        n = min(int(text.positions[-1] + 1) // N_PART, n_parts - 1)
        return np.asarray(shares[n:].max(axis=0), np.float64)[text.positions]

    return {"seen": Policy(seen), "later": Policy(later)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="of a text; as many as the model knows")
    parser.add_argument("--texts", type=int, default=1, help="one behind the other")
    parser.add_argument("--cells", type=int, default=2048)
    args = parser.parse_args()
    with kvg.Model(args.model, device="cpu") as model:
        most = 8 * args.tokens * args.texts  # bytes: more than these tokens have
        words = args.text.read_bytes()[:most].decode(errors="ignore")
        ids, first = model.tokenizer.encode(words, add_special=False), model.tokenizer.encode("")
        n = args.tokens - len(first)  # each text begins with what the model wants there
        found: dict[str, list[float]] = {}
        for i in range(args.texts):
            for name, cost in costs(model, [*first, *ids[i * n : (i + 1) * n]], args.cells):
                found.setdefault(name, []).append(cost)
                print(f"text {i}, {name}: {np.exp(cost):.2f}", flush=True)
        whole = np.mean(found["all cells"])
        for name, each in found.items():
            mean = float(np.mean(each))
            print(f"{name:10} {np.exp(mean):.2f}, {np.exp(mean - whole) - 1:+.1%}")


def costs(model: kvg.Model, ids: list[int], n_cells: int) -> Iterator[tuple[str, float]]:
    """The mean of -log p of a token of one text, by each policy."""
    whole, shares = all_cells(model, ids, n_cells)
    yield "all cells", whole
    with mock.patch.dict(cell_scores.POLICIES, known(shares)):
        for policy in ("window", "keydiff", "tova", "snapkv", "seen", "later"):
            yield policy, few_cells(model, ids, n_cells, policy)


if __name__ == "__main__":
    main()

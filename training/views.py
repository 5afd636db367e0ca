"""What a cache does to positions, for training and for testing without a cache.

A document is decoded in batches. Between two batches a cache may discard tokens, move later positions down,
or divide positions (self-extend). `Cache` follows one document through that; `Views` stacks documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
ROOM = 16  # cells that the example frees for its answer
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass
class Views:
    """For every batch of queries: its range [start, end), the positions that tokens [0, end) have then, and
    what is added to their attention scores (-inf: discarded). The arrays are (documents, end)."""

    batches: list[tuple[int, int, Tensor, Tensor]]


@dataclass
class Cache:
    """Positions of one document's tokens so far, and whether each is still there."""

    positions: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    alive: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    seen: list[tuple[int, int, Ints, Floats]] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        return int(self.positions[self.alive].max(initial=-1)) + 1

    def decode(self, n_tokens: int, weights: Floats | None = None) -> None:
        """Append a batch. `weights` (earlier tokens,): how many copies of itself each of them stands for."""
        start = len(self.positions)
        fresh = self.next_position + np.arange(n_tokens)
        bias = np.zeros(start + n_tokens, np.float32)
        if weights is not None:
            bias[:start] = np.log(weights)
        bias[:start][~self.alive] = -np.inf
        self.positions = np.concatenate([self.positions, fresh])
        self.alive = np.concatenate([self.alive, np.ones(n_tokens, np.bool_)])
        # A discarded token's position may be anything; it only has to be one.
        self.seen.append((start, start + n_tokens, np.where(self.alive, self.positions, 0), bias))

    def discard(self, first: int, n_positions: int) -> None:
        """seq_rm [first, first + n), then seq_add of -n behind it."""
        behind = self.positions >= first + n_positions
        self.alive &= behind | (self.positions < first)
        self.positions = np.where(behind, self.positions - n_positions, self.positions)

    def drop(self, begin: int, end: int) -> None:
        """Discards the tokens [begin, end); those behind them move down to where they began."""
        behind = self.positions[end:]
        self.alive[begin:end] = False
        if len(behind):
            self.positions[end:] = behind - (behind[0] - self.positions[begin])

    def shift(self, first: int, delta: int) -> None:
        self.positions = np.where(self.positions >= first, self.positions + delta, self.positions)

    def divide(self, first: int, origin: int, group: int) -> None:
        """Positions from `first` on are divided, `origin` staying where it is."""
        divided = origin + (self.positions - origin) // group
        self.positions = np.where(self.positions >= first, divided, self.positions)


def stack(caches: list[Cache]) -> Views:
    batches = []
    for parts in zip(*(cache.seen for cache in caches), strict=True):
        start, end = parts[0][:2]
        positions = torch.from_numpy(np.stack([p[2] for p in parts]))
        bias = torch.from_numpy(np.stack([p[3] for p in parts]))
        batches.append((start, end, positions, bias))
    return Views(batches)


@dataclass(frozen=True)
class Run:
    """The settings of llama.cpp's passkey example. `half`: discard half of the rest, not just one batch."""

    n_junk: int = 250
    i_pos: int = 90
    n_grp: int = 1
    n_batch: int = 2048
    n_keep: int = 32
    n_ctx: int = 4096
    half: bool = False


def follow_example(run: Run, n_prompt: int, n_answer: int) -> Cache:
    """The example's cache operations on a prompt of `n_prompt` tokens; the answer is one more batch."""
    cache = Cache()
    n_cells = run.n_ctx * run.n_grp
    for i in range(0, n_prompt, run.n_batch):
        if i < n_cells:
            if i > 0 and run.n_grp > 1:
                first = cache.next_position - run.n_batch
                cache.divide(first, first, run.n_grp)
        else:
            _make_room(cache, run, run.n_batch)
        cache.decode(min(run.n_batch, n_prompt - i))
    surplus = cache.next_position - n_cells + ROOM
    if surplus > 0:
        _make_room(cache, run, surplus)
    cache.decode(n_answer)
    return cache


def _make_room(cache: Cache, run: Run, n_wanted: int) -> None:
    if not run.half:
        cache.discard(run.n_keep, n_wanted)
    elif cache.next_position + n_wanted > run.n_ctx + run.n_keep:
        cache.discard(run.n_keep, (cache.next_position - run.n_keep) // 2)


def cut(rng: np.random.Generator, length: int, n_batches: int) -> list[int]:
    """Sizes of `n_batches` batches that make up `length` tokens."""
    edges = np.sort(rng.choice(np.arange(8, length - 4), n_batches - 1, replace=False))
    return [int(n) for n in np.diff([0, *edges, length])]


def random_cache(
    rng: np.random.Generator,
    sizes: list[int],
    filler: Flags,
    reach: int,
    drops: list[list[tuple[int, int]]] | None = None,
) -> Cache:
    """A short document seen as a cache could show it after much more text.

    Between its batches, positions are divided, moved apart or closed up, up to `reach`; and each token of
    filler stands for many (their logarithm is added to its scores), so that attention has to stay sharp.
    drops: the ranges of tokens discarded before each batch; None: any, drawn as the other events are.
    """
    cache = Cache()
    length = sum(sizes)
    most = np.log(max(2 * reach / length, 1.0))
    for i, size in enumerate(sizes):
        weights = None
        for begin, stop in drops[i] if drops else []:
            cache.drop(begin, stop)
        if cache.seen:
            for _ in range(rng.integers(1, 3)):
                _random_event(rng, cache, reach - (length - len(cache.positions)), may_discard=drops is None)
            start = len(cache.positions)
            weights = np.where(filler[:start], np.exp(most * rng.random() ** 0.5), 1.0).astype(np.float32)
        cache.decode(size, weights)
    return cache


def _random_event(rng: np.random.Generator, cache: Cache, reach: int, may_discard: bool) -> None:
    end = cache.next_position
    if end < 4:
        return
    first = int(rng.integers(1, end))
    kind = rng.random()
    if kind < 0.25:
        group = int(rng.choice([2, 2, 4]))
        cache.divide(first, first, group)
    elif kind < 0.35 and may_discard:
        cache.discard(int(rng.integers(1, end)), int(rng.integers(1, 1 + end // 4)))
    elif kind < 0.85 and reach > end:
        cache.shift(first, int((reach - end) * rng.random() ** 0.5))

"""One small face for our context and for libllama's, so that a scenario is written once and run on both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pytest

import pykvgraph as kvg
from support import where

Logits = npt.NDArray[np.float32]  # (n_outputs, n_vocab)


class Token(NamedTuple):
    """A token as both engines decode it."""

    id: int
    pos: int
    seq_ids: tuple[int, ...] = (0,)
    logits: bool = True


def run_of(ids: Iterable[int], pos0: int = 0, seq_ids: tuple[int, ...] = (0,)) -> list[Token]:
    """Tokens at consecutive positions, each with logits."""
    return [Token(int(token), pos0 + i, seq_ids) for i, token in enumerate(ids)]


class Engine(Protocol):
    """What a scenario may ask of an engine. Ranges are [p0, p1); a negative end means none."""

    def decode(self, tokens: Iterable[Token]) -> Logits: ...
    def seq_rm(self, seq: int, p0: int, p1: int) -> None: ...
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None: ...
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None: ...


Scenario = Callable[[Engine], Logits]


def open_context(model: kvg.Model, **options: Any) -> kvg.Context:
    """A context on one thread: more of them only wait for each other in models this small.

    Skips a test of types that the device of `--device` hasn't.
    """
    try:
        return kvg.Context(
            model, **{"n_threads": 1, "n_threads_batch": 1, **where.tier_of(options), **options}
        )
    except kvg.UnsupportedError as refused:
        if where.is_cpu() or model.device != where.device:
            raise
        pytest.skip(str(refused))


def batch_of(tokens: Iterable[Token]) -> kvg.Batch:
    batch = kvg.Batch()
    for token in tokens:
        batch.add(token.id, token.pos, seq_ids=token.seq_ids, logits=token.logits)
    return batch


def decode(ctx: kvg.Context, tokens: Iterable[Token]) -> Logits:
    """Decodes on our context; the logits of the tokens that asked."""
    ctx.decode(batch_of(tokens))
    return ctx.logits()


def repair(ctx: kvg.Context, tokens: Iterable[Token]) -> Logits:
    """The same in the middle of texts, or in place of what stands there."""
    ctx.decode(batch_of(tokens), repair=True)
    return ctx.logits()


class OurEngine:
    """A context of ours behind `Engine`."""

    def __init__(self, ctx: kvg.Context) -> None:
        self.ctx = ctx

    def decode(self, tokens: Iterable[Token]) -> Logits:
        return decode(self.ctx, tokens)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.ctx.kv.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.ctx.kv.seq_cp(src, dst, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.ctx.kv.seq_add(seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.ctx.kv.seq_div(seq, p0, p1, d)


def prompt_then_singles(engine: Engine, ids: Sequence[int], n_prompt: int, pos0: int = 0) -> Logits:
    """The first n_prompt ids in one batch, the others one by one; every row of logits."""
    rows = [engine.decode(run_of(ids[:n_prompt], pos0))] if n_prompt else []
    rows += [engine.decode([Token(int(token), pos0 + i)]) for i, token in enumerate(ids) if i >= n_prompt]
    return np.concatenate(rows)


def random_ids(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Token ids without the control tokens of `support.models`."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, n_vocab, n)]


def ids_of(model: kvg.Model, n: int, seed: int) -> list[int]:
    """Token ids of the whole vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(model.n_vocab) for _ in range(n)]

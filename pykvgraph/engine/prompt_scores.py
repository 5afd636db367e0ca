"""How likely each token of a prompt was, behind those before it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pykvgraph.adapter import Active, Adapter
from pykvgraph.batch import Batch
from pykvgraph.checks import INT32_MAX, integer
from pykvgraph.context import Context
from pykvgraph.engine.engine import Engine
from pykvgraph.errors import CacheFullError, KVGraphError
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.text.likeliest import likeliest

_N_ROWS = 64  # tokens a step, as each has a row of logits; the others' texts go on in between


class TokenScore(NamedTuple):
    """A token, the logarithm of its probability, and the likeliest tokens in its place, each with its own."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def prompt_scores(
    engine: Engine,
    prompt: Sequence[int],
    n_top: int,
    *,
    salt: bytes = b"",
    adapters: Iterable[tuple[Adapter, float]] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[TokenScore]:
    """Of each token but the first, before which there is nothing.

    prompt, salt, adapters: as submit() has them. Decoded a part at a time, between the steps of others; what
    is decoded is kept for whoever submits the prompt then. is_wanted: asked before each part; False ends it.
    Raises what Engine.embed() raises.
    """
    ids = array("i", engine._ids_of(list(prompt)).tobytes())
    n_top = integer(n_top, "n_top", 0, INT32_MAX)
    active, salted = engine._under(adapters, salt)
    found: list[TokenScore] = []
    step = min(_N_ROWS, engine.context.n_batch)
    for begin in range(0, len(ids) - 1, step):
        if not is_wanted():
            break
        end = min(begin + step, len(ids) - 1)
        part = functools.partial(_part, engine.context, active, salted, ids, begin, end, n_top)
        found += engine._do(part)
    return found


def _part(
    ctx: Context,
    active: Active,
    salt: bytes,
    ids: array[int],
    begin: int,
    end: int,
    n_top: int,
    index: PrefixIndex,
    seq: int,
) -> list[TokenScore]:
    """Of the tokens behind ids[begin:end]; in an empty sequence, with what the index has of the text."""
    ctx.set_adapters(active)
    found = index.find(ids, begin, salt)
    last = index.attach(found, seq)
    try:
        if not index.make_room(end - found.n):
            raise CacheFullError(f"the prompt has {len(ids)} tokens, and there is no room for it now")
        batch = Batch()
        for at in range(found.n, begin, ctx.n_batch):
            batch.clear()
            batch.extend(ids[at : min(at + ctx.n_batch, begin)], at, (seq,), False)
            ctx.decode(batch)
        batch.clear()
        batch.extend(ids[begin:end], begin, (seq,), "all")
        ctx.decode(batch, scores=True)
        index.keep(ids, end, seq, salt)
    finally:
        index.unpin(last)
    rows, log_sums = ctx.logits_view(), ctx.scores().log_sum.tolist()
    scores = []
    for row, log_sum, token in zip(rows, log_sums, ids[begin + 1 : end + 1], strict=True):
        top = tuple((each, logit - log_sum) for each, logit in likeliest(row, n_top))
        scores.append(TokenScore(token, float(row[token]) - log_sum, top))
    if any(score.logprob != score.logprob for score in scores):
        raise KVGraphError("the logits are no numbers: the model's weights are broken")
    return scores

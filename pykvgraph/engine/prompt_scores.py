"""How likely each token of a prompt was, behind those before it."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pykvgraph.checks import INT32_MAX, integer
from pykvgraph.context.context import Context
from pykvgraph.engine.engine import Engine
from pykvgraph.engine.reading import Reading
from pykvgraph.errors import KVGraphError
from pykvgraph.model.adapter import Adapter
from pykvgraph.sampling.sampler import likeliest


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

    prompt, salt, adapters: as submit() has them. Read in parts, between the steps of others; what is decoded
    is kept for whoever submits the prompt then. is_wanted: asked before each part, by the thread that takes
    the steps; False ends it. Raises what Engine.embed() raises.
    """
    ids = array("i", engine._ids_of(list(prompt)).tobytes())
    n_top = integer(n_top, "n_top", 0, INT32_MAX)
    active, salted = engine._under(adapters, salt)
    if len(ids) == 1:
        return []
    take = functools.partial(_scores, engine.context, ids, n_top)
    parts = engine._loop.read(Reading(ids[:-1], active, take, is_wanted, scores=True, salt=salted))
    return list(itertools.chain.from_iterable(parts))


def _scores(ctx: Context, ids: array[int], n_top: int, begin: int, end: int) -> list[TokenScore]:
    """Of the tokens behind ids[begin:end], which were just decoded."""
    rows, log_sums = ctx.logits_view(), ctx.scores().log_sum.tolist()
    scores = []
    for row, log_sum, token in zip(rows, log_sums, ids[begin + 1 : end + 1], strict=True):
        top = tuple((each, logit - log_sum) for each, logit in likeliest(row, n_top))
        scores.append(TokenScore(token, float(row[token]) - log_sum, top))
    if any(score.logprob != score.logprob for score in scores):
        raise KVGraphError("the logits are no numbers: the model's weights are broken")
    return scores

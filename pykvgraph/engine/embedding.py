"""Embeddings: the hidden states of texts, each pooled into one, or of each token."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import Integers, several, shown
from pykvgraph.context.context import Context
from pykvgraph.context.pooling import POOLINGS, Pooling, pooled
from pykvgraph.context.prompt_batches import groups_of, states_of
from pykvgraph.engine.loop import Loop
from pykvgraph.engine.reading import Reading
from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.model.adapter import Active
from pykvgraph.prefix.index import PrefixIndex

_Array = npt.NDArray[np.float32]


def check(prompts: Sequence[str | Integers], pooling: Pooling) -> Sequence[str | Integers]:
    """The arguments of Engine.embed_all(). Raises InvalidArgumentError."""
    given = None if isinstance(prompts, str) else several(prompts)
    if given is None:
        raise InvalidArgumentError(f"prompts must be a list of prompts, got {shown(prompts)}")
    if not isinstance(pooling, str) or pooling not in POOLINGS:
        raise InvalidArgumentError(f"pooling must be one of {POOLINGS}, got {shown(pooling)}")
    return given


def embed_all(
    loop: Loop,
    texts: Sequence[array[int]],
    pooling: Pooling,
    adapters: Active,
    is_wanted: Callable[[], bool],
) -> list[_Array]:
    """The vectors of texts, which are decoded between the steps of others.

    is_wanted: asked before each part of a text, by the thread that takes the steps, too; False ends it, and
    only the texts before have vectors.
    """
    ctx = loop.context
    found: list[_Array] = []
    if ctx.model.encodes:
        for group in groups_of(texts, min(ctx.n_batch, ctx.n_ctx), ctx.n_seq_max):
            if not is_wanted():
                break
            states = loop.run_between_steps(functools.partial(_encoded, ctx, adapters, pooling, group))
            found += [_vector(rows, pooling) for rows in states]
        return found
    for text in texts:
        ids = text[:1] if pooling == "first" else text  # the first sees no later token
        outputs: Literal["all", "last"] = "last" if pooling == "last" else "all"
        reading = Reading(ids, adapters, lambda begin, end: ctx.embeddings(), is_wanted, outputs=outputs)
        parts = loop.read(reading)
        if reading.n_left:
            break
        found.append(_vector(np.concatenate(parts), pooling))
    return found


def _encoded(
    ctx: Context, adapters: Active, pooling: Pooling, group: Sequence[Sequence[int]], _: PrefixIndex, seq: int
) -> list[_Array]:
    """Of an encoder's texts, each as a whole: it keeps nothing, so that each may have any sequence."""
    ctx.set_adapters(adapters)
    return states_of(ctx, group, "last" if pooling == "last" else "all")


def _vector(states: _Array, pooling: Pooling) -> _Array:
    if not np.isfinite(states).all():
        raise KVGraphError("the model's hidden states are no numbers: its weights are broken")
    return pooled(states, pooling)

"""Embeddings: the hidden states of texts, each pooled into one, or of each token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.batch import Batch
from pykvgraph.context import Context
from pykvgraph.errors import CacheFullError, KVGraphError
from pykvgraph.pooling import Pooling, pooled
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.texts_together import groups_of, states_of

_N_ROWS = 64  # tokens with outputs in one batch, as each output has logits, too


def groups(ctx: Context, texts: Sequence[array[int]]) -> Iterator[Sequence[Any]]:
    """Texts that embed() takes together. Raises InvalidArgumentError for what an encoder can't take."""
    if ctx.model.encodes:
        return groups_of(texts, min(ctx.n_batch, ctx.n_ctx), ctx.n_seq_max)
    return ([ids] for ids in texts)


def embed(
    ctx: Context, pooling: Pooling, texts: Sequence[array[int]], index: PrefixIndex, seq: int
) -> list[npt.NDArray[np.float32]]:
    """Of each text (n_embd,), or with pooling "none" (n_tokens, n_embd).

    Several texts are an encoder's, which keeps nothing: they have a sequence each. One is decoded in `seq`,
    which is empty, and full behind it.
    """
    if ctx.model.encodes:
        states = states_of(ctx, texts, "last" if pooling == "last" else "all")
    else:
        states = [_states(ctx, index, seq, ids, pooling) for ids in texts]
    if not all(np.isfinite(rows).all() for rows in states):
        raise KVGraphError("the model's hidden states are no numbers: its weights are broken")
    return [pooled(rows, pooling) for rows in states]


def _states(
    ctx: Context, index: PrefixIndex, seq: int, ids: array[int], pooling: Pooling
) -> npt.NDArray[np.float32]:
    if pooling == "first":
        ids = ids[:1]  # it sees no later token
    if not index.make_room(len(ids)):
        raise CacheFullError(f"the text has {len(ids)} tokens, and there is no room for it now")
    batch, found = Batch(), []
    step = min(ctx.n_batch, ctx.n_batch if pooling == "last" else _N_ROWS)
    for begin in range(0, len(ids), step):
        batch.clear()
        batch.extend(ids[begin : begin + step], begin, (seq,), "last" if pooling == "last" else "all")
        ctx.decode(batch)
        found.append(ctx.embeddings())
    states: npt.NDArray[np.float32] = np.concatenate(found)
    return states

"""Embeddings: the hidden states of a text, pooled into one, or of each token."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from pykvgraph.batch import Batch
from pykvgraph.context import Context
from pykvgraph.errors import CacheFullError, KVGraphError
from pykvgraph.pooling import Pooling, pooled
from pykvgraph.prefix.index import PrefixIndex

_N_ROWS = 64  # tokens with outputs in one batch, as each output has logits, too


def embed(
    ctx: Context, index: PrefixIndex, seq: int, ids: array[int], pooling: Pooling
) -> npt.NDArray[np.float32]:
    """(n_embd,), or with pooling "none" (n_tokens, n_embd): in an empty sequence, which is full behind it."""
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
    if not np.isfinite(states).all():
        raise KVGraphError("the model's hidden states are no numbers: its weights are broken")
    return pooled(states, pooling)

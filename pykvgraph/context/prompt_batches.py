"""Texts that are decoded together: as many as a batch has room for, each in a sequence of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError


def groups_of(
    texts: Sequence[Sequence[int]], n_batch: int, n_seq_max: int
) -> Iterator[Sequence[Sequence[int]]]:
    """The texts in their order, cut into groups of at most n_batch tokens and n_seq_max texts.

    Raises InvalidArgumentError for a text that is empty, or longer than n_batch.
    """
    for index, ids in enumerate(texts):
        if not 0 < len(ids) <= n_batch:
            raise InvalidArgumentError(
                f"text {index} has {len(ids)} tokens, expected 1 to {n_batch}, as it is decoded by one call: "
                "shorten it, or use a larger n_batch and n_ctx"
            )
    begin, n_tokens = 0, 0
    for end, ids in enumerate(texts):
        if end - begin == n_seq_max or n_tokens + len(ids) > n_batch:
            yield texts[begin:end]
            begin, n_tokens = end, 0
        n_tokens += len(ids)
    if texts:
        yield texts[begin:]


def states_of(
    ctx: Context, texts: Sequence[Sequence[int]], which: Literal["all", "last"]
) -> list[npt.NDArray[np.float32]]:
    """The hidden states of each text's tokens, or of its last one, (n, n_embd): one group, by one call.

    Text i is in sequence i, which must be empty. Raises what Context.decode raises.
    """
    batch = Batch()
    for seq, ids in enumerate(texts):
        batch.extend(ids, 0, (seq,), which)
    ctx.decode(batch)
    ends = np.cumsum([len(ids) if which == "all" else 1 for ids in texts])
    return np.split(ctx.embeddings(), ends[:-1])

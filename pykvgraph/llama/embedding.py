"""embed: hidden states of texts, several at a time, each pooled or for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvgraph.context.pooling import pooled, pooling_of
from pykvgraph.context.prompt_batches import groups_of, states_of
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.model import Model

if TYPE_CHECKING:
    from pykvgraph.llama.llama import Llama

_TOGETHER = 16  # texts that one batch may have


def n_together(model: Model, embedding: bool) -> int:
    """How many sequences a context needs for that. A state for each would cost more than it gains."""
    has_states = any(layer.kind != "attention" for layer in model.layers)
    return _TOGETHER if embedding and not has_states else 1


def embed(llama: Llama, texts: list[str], normalize: bool, truncate: bool) -> tuple[list[Any], int]:
    """The embeddings of texts, and the number of their tokens. The Llama's text is forgotten."""
    pooling = pooling_of(llama._pooling_type, llama.metadata)
    ctx, kept, most = llama.context, [], llama.n_batch
    if llama.model.encodes:
        most = min(most, llama.model.n_ctx_train)
    for text in texts:
        tokens = llama.tokenize(text.encode())
        if len(tokens) > most and not truncate:
            raise InvalidArgumentError(
                f"a text of {len(tokens)} tokens exceeds {most}, the smaller of n_batch and what the model "
                "was trained for: raise n_batch, or truncate"
            )
        kept.append(tokens[:most])
    found = []
    for group in groups_of(kept, llama.n_batch, ctx.n_seq_max):
        llama.kv.clear()
        for states in states_of(ctx, group, "last" if pooling == "last" else "all"):
            rows: npt.NDArray[np.floating[Any]] = pooled(states, pooling)
            if normalize:
                lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
                rows = rows / np.where(lengths == 0, 1, lengths)
            found.append(rows.tolist())
    llama.kv.clear()
    llama.reset()
    return found, sum(map(len, kept))

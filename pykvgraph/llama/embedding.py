"""embed: hidden states of texts, one by one, each pooled or for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvgraph.batch import Batch
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.pooling import pooled, pooling_of

if TYPE_CHECKING:
    from pykvgraph.llama.llama import Llama


def embed(llama: Llama, texts: list[str], normalize: bool, truncate: bool) -> tuple[list[Any], int]:
    """The embeddings of texts, and the number of their tokens. The Llama's text is forgotten."""
    pooling = pooling_of(llama._pooling_type, llama.metadata)
    found, n_tokens = [], 0
    for text in texts:
        tokens = llama.tokenize(text.encode())
        if len(tokens) > llama.n_batch:
            if not truncate:
                raise InvalidArgumentError(
                    f"a text of {len(tokens)} tokens exceeds n_batch, {llama.n_batch}: raise it, or truncate"
                )
            tokens = tokens[: llama.n_batch]
        n_tokens += len(tokens)
        rows: npt.NDArray[np.floating[Any]] = pooled(_states(llama, tokens), pooling)
        if normalize:
            lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
            rows = rows / np.where(lengths == 0, 1, lengths)
        found.append(rows.tolist())
    llama.kv.clear()
    llama.reset()
    return found, n_tokens


def _states(llama: Llama, tokens: list[int]) -> npt.NDArray[np.float32]:
    """(n_tokens, n_embd)"""
    llama.kv.clear()
    batch = Batch()
    batch.extend(tokens, 0, logits="all")
    llama.context.decode(batch)
    return llama.context.embeddings()

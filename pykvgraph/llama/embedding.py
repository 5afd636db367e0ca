"""embed and rank: hidden states of texts, several at a time, each pooled or for every token, or scored."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.context.pooling import Pooling, pooled
from pykvgraph.context.prompt_batches import groups_of, states_of
from pykvgraph.context.ranking import pair_tokens, pooling_of_classes, scores_of
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.llama.session import LlamaSession
from pykvgraph.model.model import Model

_TOGETHER = 16  # texts that one batch may have


def n_together(model: Model, embedding: bool) -> int:
    """How many sequences a context needs for that. A state for each would cost more than it gains."""
    has_states = any(layer.kind != "attention" for layer in model.layers)
    return _TOGETHER if embedding and not has_states else 1


def embed(
    session: LlamaSession, texts: list[str], pooling: Pooling, normalize: bool, truncate: bool
) -> tuple[list[Any], int]:
    """The embeddings of texts, and the number of their tokens. The session's text is forgotten."""
    kept, most = [], session.n_batch
    if session.model.encodes:
        most = min(most, session.model.n_ctx_train)
    for text in texts:
        tokens = session.tokenize(text.encode())
        if len(tokens) > most and not truncate:
            raise InvalidArgumentError(
                f"a text of {len(tokens)} tokens exceeds {most}, the smaller of n_batch and what the model "
                "was trained for: raise n_batch, or truncate"
            )
        kept.append(tokens[:most])
    found = []
    rows: npt.NDArray[np.floating[Any]]
    for rows in _vectors(session, kept, pooling):
        if normalize:
            lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
            rows = rows / np.where(lengths == 0, 1, lengths)
        found.append(rows.tolist())
    return found, sum(map(len, kept))


def rank(session: LlamaSession, query: str, documents: list[str]) -> list[float]:
    """The score of each document. The session's text is forgotten."""
    prompts = [pair_tokens(session.model, query, each) for each in documents]
    return scores_of(session.context, _vectors(session, prompts, pooling_of_classes(session.model)))


def _vectors(
    session: LlamaSession, texts: list[list[int]], pooling: Pooling
) -> list[npt.NDArray[np.float32]]:
    ctx, found = session.context, []
    for group in groups_of(texts, session.n_batch, ctx.n_seq_max):
        session.kv.clear()
        states = states_of(ctx, group, "last" if pooling == "last" else "all")
        found += [pooled(rows, pooling) for rows in states]
    session.kv.clear()
    session.reset()
    return found

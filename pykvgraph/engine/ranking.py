"""Scores of documents: each is read with the query, and the model's classifier sees the pooled states."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from pykvgraph.checks import several, shown
from pykvgraph.context.ranking import pair_tokens, pooling_of_classes, scores_of
from pykvgraph.engine import embedding
from pykvgraph.engine.loop import Loop
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.adapter import Active
from pykvgraph.model.model import Model


def pairs_of(model: Model, query: str, documents: Sequence[str]) -> list[array[int]]:
    """The arguments of Engine.rank(), as prompts. Raises InvalidArgumentError and what encode() raises."""
    given = None if isinstance(documents, str) else several(documents)
    if given is None:
        raise InvalidArgumentError(f"documents must be a list of texts, got {shown(documents)}")
    return [array("i", pair_tokens(model, query, document)) for document in given]


def rank_all(
    loop: Loop, texts: Sequence[array[int]], adapters: Active, is_wanted: Callable[[], bool]
) -> list[float]:
    """The score of each prompt: the first of its classes. is_wanted: as in embedding.embed_all()."""
    ctx = loop.context
    vectors = embedding.embed_all(loop, texts, pooling_of_classes(ctx.model), adapters, is_wanted)
    if not vectors:
        return []
    scores: list[float] = loop.run_between_steps(lambda _index, _seq: scores_of(ctx, vectors))
    return scores

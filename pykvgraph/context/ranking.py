"""Ranking: how well each of several documents answers a query, as a reranker's classifier says."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import shown
from pykvgraph.context.context import Context
from pykvgraph.context.pooling import Pooling
from pykvgraph.errors import InvalidArgumentError, KVGraphError, UnsupportedError
from pykvgraph.model.model import Model

_TEMPLATE = "tokenizer.chat_template.rerank"
_PLACE = re.compile(r"\{(query|document)\}")


def pooling_of_classes(model: Model) -> Pooling:
    """What the model's classifier sees of a text. UnsupportedError for a model without one."""
    if model.n_classes == 0:
        raise UnsupportedError(
            f"{model.path} is no reranker: it has no classifier (a tensor 'cls.output.weight'), so that it "
            "can't score texts. Its embeddings may be compared instead"
        )
    if model.classifies_by_mean:
        return "mean"
    return "first" if model.encodes else "last"


def scores_of(ctx: Context, vectors: Sequence[npt.NDArray[np.float32]]) -> list[float]:
    """Of texts that were pooled: for each the first of its classes.

    Raises KVGraphError where these are no numbers, which have no order.
    """
    if not vectors:
        return []
    scores = ctx.classify(np.stack(vectors))[:, 0]
    if not np.isfinite(scores).all():
        raise KVGraphError("the scores of the model's classifier are no numbers: its weights are broken")
    return [float(score) for score in scores]


def pair_tokens(model: Model, query: str, document: str) -> list[int]:
    """The prompt that a reranker scores: by the file's template, else the two texts with tokens between.

    With a template both texts may spell control tokens, as in llama-server. Raises InvalidArgumentError for
    what is no text, and what Tokenizer.encode() raises.
    """
    for name, text in (("query", query), ("document", document)):
        if not isinstance(text, str):
            raise InvalidArgumentError(f"the {name} must be a text, got {shown(text)}")
    template = model._value(_TEMPLATE)
    if not isinstance(template, str):
        return model.tokenizer.encode_pair(query, document)
    texts = {"query": query, "document": document}
    prompt = _PLACE.sub(lambda place: texts[place[1]], template)
    return model.tokenizer.encode(prompt, False, True)

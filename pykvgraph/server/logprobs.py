"""Probabilities of tokens, as llama-server tells them."""

from __future__ import annotations

from typing import Any

from pykvgraph.server.sample import Sample
from pykvgraph.server.vocabulary import Vocabulary
from pykvgraph.server.wire_json import finite
from pykvgraph.types import Piece


def logprobs_of(piece: Piece, vocabulary: Vocabulary) -> dict[str, Any]:
    """Of a token that was said, and of the likeliest ones in its place."""
    top = [_told(token, logprob, vocabulary) for token, logprob in piece.top]
    return {**_told(piece.token, piece.logprob, vocabulary), "top_logprobs": top}


def content_logprobs(sample: Sample, pieces: list[Piece], vocabulary: Vocabulary) -> dict[str, Any] | None:
    """OpenAI's field `logprobs` for some pieces of a sample; None when nobody asked for them."""
    return {"content": [logprobs_of(each, vocabulary) for each in pieces]} if sample.n_probs else None


def _told(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.piece(token)
    return {
        "id": token,
        "token": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": finite(logprob),
    }

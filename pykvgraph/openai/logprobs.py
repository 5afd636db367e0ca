"""Probabilities of tokens, as llama-server tells them."""

from __future__ import annotations

import math
from typing import Any

from pykvgraph.openai.sample import Sample
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import finite
from pykvgraph.types import Piece


def logprobs_of(sample: Sample, piece: Piece, vocabulary: Vocabulary) -> dict[str, Any]:
    """Of a token that was said, and of the likeliest ones in its place.

    Probabilities behind all samplers are told as they are, the model's own by their logarithms.
    """
    told, name = _logprob, "top_logprobs"
    if sample.settings["post_sampling_probs"]:
        told, name = _prob, "top_probs"
    top = [_token(token, vocabulary) | told(logprob) for token, logprob in piece.top]
    own = _token(piece.token, vocabulary)
    if piece.finish_reason == "stop":  # all tokens together are the text, and this one only ends it
        own |= {"token": "", "bytes": []}
    return {**own, **told(piece.logprob), name: top}


def content_logprobs(sample: Sample, pieces: list[Piece], vocabulary: Vocabulary) -> dict[str, Any] | None:
    """OpenAI's field `logprobs` for some pieces of a sample; None when nobody asked for them."""
    if not sample.tells_probs:
        return None
    return {"content": [logprobs_of(sample, each, vocabulary) for each in pieces]}


def _token(token: int, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.piece(token)
    return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data)}


def _logprob(logprob: float) -> dict[str, Any]:
    return {"logprob": finite(logprob)}


def _prob(logprob: float) -> dict[str, Any]:
    return {"prob": math.exp(logprob)}

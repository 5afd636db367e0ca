"""The field `logprobs` of /v1/completions: llama-server's list, and OpenAI's four."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from pykvgraph.openai.logprobs import logprobs_of
from pykvgraph.openai.sample import Sample
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import finite
from pykvgraph.types import Piece


def text_logprobs(
    sample: Sample,
    said: Sequence[Piece],
    vocabulary: Vocabulary,
    *,
    offset: int = 0,
    asked: Sequence[Piece] = (),
    prompt: str = "",
) -> dict[str, Any]:
    """Of the tokens of a prompt that the answer begins with, if any, and of those that were said.

    offset: characters of the answer before these. A token that has no probability, as nothing comes before
    it, has NaN as its logarithm, and null here.
    """
    content = []
    for piece in (*asked, *said):
        told = logprobs_of(sample, piece, vocabulary)
        if math.isnan(piece.logprob):
            told["prob" if "prob" in told else "logprob"] = None
        content.append(told)
    starts = _starts([vocabulary.piece(piece.token) for piece in asked], len(prompt))
    at = offset + len(prompt)
    for piece in said:
        if piece.finish_reason == "stop":  # text that was held back is in front of the token that ends it
            at += len(piece.text)
        starts.append(at)
        at += len(piece.text)
    known = [None if math.isnan(piece.logprob) else piece for piece in (*asked, *said)]
    return {
        "content": content,
        "tokens": [told["token"] for told in content],
        "token_logprobs": [piece and finite(piece.logprob) for piece in known],
        "top_logprobs": [piece and _by_name(piece, vocabulary) for piece in known],
        "text_offset": starts,
    }


def _by_name(piece: Piece, vocabulary: Vocabulary) -> dict[str, float]:
    """The likeliest tokens and the one that was said; of those of the same name, the likeliest."""
    pairs = {(piece.token, piece.logprob), *piece.top}
    return {
        vocabulary.text([token]): finite(logprob)
        for token, logprob in sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    }


def _starts(pieces: Sequence[bytes], n_characters: int) -> list[int]:
    """Where each token begins in their text, which may lack what they begin with: BOS, and a space."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, n = [], 0
    for piece in pieces:
        starts.append(n)
        n += len(decoder.decode(piece))
    n += len(decoder.decode(b"", True))
    return [max(start - (n - n_characters), 0) for start in starts]

"""Tokens that may follow texts, drafted by the model's own draft head (MTP)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph._native.ffi import KvgDraftRequest, KvgOutput
from pykvgraph._native.library import lib, sized


class DraftedText(NamedTuple):
    """What a draft is made for."""

    seq: int  # its sequence
    token: int  # the last token of the text, which is not decoded yet
    n: int  # tokens to draft, at most


def draft_tokens(
    context: int, texts: Sequence[DraftedText], output: KvgOutput | None = None
) -> list[list[int]]:
    """For each text the tokens that may follow it; output: gets the head's logits and states (kvg_draft)."""
    most = max((text.n for text in texts), default=0)
    if not most:
        return [[] for _ in texts]
    n = len(texts)
    array = ctypes.c_int32 * n  # NumPy's pointers would take as long as half a draft
    seq, token, n_tokens = (array(*column) for column in zip(*texts, strict=True))
    drafted = (ctypes.c_int32 * (n * most))()
    request = sized(KvgDraftRequest, n=n, seq=seq, token=token, n_tokens=n_tokens, most=most, drafted=drafted)
    lib().kvg_draft(context, ctypes.byref(request), None if output is None else ctypes.byref(output))
    return [[t for t in drafted[begin : begin + most] if t >= 0] for begin in range(0, n * most, most)]

"""Pooling: how the hidden states of a text become one vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import UnsupportedError

Pooling = Literal["none", "mean", "first", "last"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)  # in the order of llama.cpp's numbers, which files have
RANK = len(POOLINGS)  # the number of rerankers: scores in place of vectors


def pooling_of(wanted: int, metadata: Mapping[str, str]) -> Pooling:
    """The pooling with llama.cpp's number `wanted`, below 0 the file's own. UnsupportedError for another."""
    number = number_of(wanted, metadata)
    if number == RANK:
        raise UnsupportedError(
            "pooling_type: 4 is a reranker's, which scores texts and embeds none: use rank(), or another one"
        )
    if number not in range(len(POOLINGS)):
        names = ", ".join(f"{i} ({name})" for i, name in enumerate(POOLINGS))
        shown = "the file's is no number, which" if number < 0 else number
        raise UnsupportedError(f"pooling_type: {shown} is not supported; there are {names}")
    return POOLINGS[number]


def number_of(wanted: int, metadata: Mapping[str, str]) -> int:
    """llama.cpp's number of a pooling: `wanted`, below 0 the file's own; -1: that is no number."""
    found = str(metadata.get(f"{metadata.get('general.architecture', '')}.pooling_type", 0))
    own = int(found) if found.isdecimal() else -1
    return wanted if wanted >= 0 else own


def pooled(states: npt.NDArray[np.float32], pooling: Pooling) -> npt.NDArray[np.float32]:
    """states: (n_tokens, n_embd). (n_embd,), or with "none" the states."""
    if pooling == "none":
        return states
    vector: npt.NDArray[np.float32]
    vector = states.mean(axis=0) if pooling == "mean" else states[0 if pooling == "first" else -1]
    return vector

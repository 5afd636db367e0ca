"""The hidden states that a stage of a pipeline takes in place of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError


def checked_hidden(hidden: Any, n_tokens: int, n_embd: int) -> npt.NDArray[np.float32]:
    """float32 (n_tokens, n_embd), contiguous.

    Raises InvalidArgumentError for another shape or type, and for a number that isn't finite.
    """
    if not isinstance(hidden, np.ndarray) or hidden.dtype != np.float32:
        raise InvalidArgumentError(f"hidden must be a float32 array, got {shown(hidden)}")
    if hidden.shape != (n_tokens, n_embd):
        raise InvalidArgumentError(
            f"hidden must have {n_tokens} x {n_embd} numbers, a row for each token, got {hidden.shape}"
        )
    if not np.isfinite(hidden).all():
        raise InvalidArgumentError("hidden has a number that isn't finite: the stage before has overflowed")
    return np.ascontiguousarray(hidden)

"""The likeliest tokens of a row of logits, or of log probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def likeliest(row: npt.NDArray[np.floating[Any]], n: int) -> list[tuple[int, float]]:
    """The n tokens with the highest values, each with its value; the highest first, of equals the highest id.

    row: (n_vocab,). n may be more than the row has.
    """
    n = min(n, len(row))
    if not n:
        return []
    candidates = np.argpartition(row, len(row) - n)[len(row) - n :]
    ordered = sorted(((float(row[token]), int(token)) for token in candidates), reverse=True)
    return [(token, value) for value, token in ordered]

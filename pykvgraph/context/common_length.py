"""The longest common beginning of two texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import Integers


def common_length(left: bytes | Integers, right: bytes | Integers) -> int:
    """With how many tokens both begin; bytes have 32 bits a token."""
    a, b = map(_array, (left, right))
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _array(ids: bytes | Integers) -> npt.NDArray[np.integer[Any]]:
    # a copy: an array.array can't change its size while somebody has a view of it, as a traceback may
    return np.frombuffer(ids, np.int32) if isinstance(ids, bytes) else np.array(ids)

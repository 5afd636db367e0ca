"""What is added to the logits of some tokens before one is chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import INT32_MAX, integer, real, several, shown
from pykvgraph.errors import InvalidArgumentError

_MOST_BIAS = 1e30
_NATIVE_BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])  # llama_logit_bias


class Biases(tuple[tuple[int, float], ...]):
    """Checked pairs of a token and what is added to its logit. native: the same, as libllama takes them."""

    native: npt.NDArray[np.void]  # (n,), of (int32, float32)

    def __new__(cls, pairs: Iterable[tuple[int, float]] = ()) -> Biases:
        found = super().__new__(cls, pairs)
        with np.errstate(over="ignore"):  # -1e300 is as good as -inf
            found.native = np.array(list(found), _NATIVE_BIAS)
        return found


def checked_biases(values: Any) -> Biases:
    """{token: bias}, or pairs. Raises InvalidArgumentError.

    Each pair is looked at once, however often the parameters are replaced: there may be 262,144.
    """
    if isinstance(values, Biases):
        return values
    items = several(values.items() if isinstance(values, Mapping) else values)
    if items is None or isinstance(values, (str, bytes)):
        raise InvalidArgumentError(f"logit_bias must be {{token: bias}}, got {shown(values)}")
    return Biases(_checked_pairs(items).items())


def _checked_pairs(items: list[Any]) -> dict[int, float]:
    pairs: dict[int, float] = {}
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise InvalidArgumentError(f"logit_bias must be {{token: bias}}, got {shown(item)}")
        token, bias = item
        if type(token) is not int or type(bias) is not float or not 0 <= token <= INT32_MAX:
            token = integer(token, "logit_bias's token", 0, INT32_MAX)
        if type(bias) is not float or not bias <= _MOST_BIAS:
            bias = real(bias, f"logit_bias[{token}]", -math.inf, _MOST_BIAS)
        pairs[token] = bias
    return pairs

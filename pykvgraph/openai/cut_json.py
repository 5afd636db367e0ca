"""JSON that breaks off: what of it is certain."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SIGNS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[][{},]', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}


def plain_json(text: str) -> Any:
    """A JSON text's value. Raises ValueError, also for NaN and for numbers that are none of a computer's."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def as_far_as_it_goes(text: str) -> Any:
    """The value of the beginning of a JSON text, with all that has ended there, as clients read a stream.

    A string, a constant or a member that has only begun is left out; a number stays as far as it came. What
    is no JSON is left out, too. Raises ValueError where nothing has begun that is, and RecursionError for
    what is nested too deeply.
    """
    open_ones: list[str] = []
    last = 0  # where something has ended
    for found in _SIGNS.finditer(text):
        sign = found[0]
        if sign == ",":
            last = found.start()
        elif sign in _CLOSES:
            open_ones.append(_CLOSES[sign])
            last = found.end()
        elif sign in "]}" and open_ones:
            open_ones.pop()
            last = found.end()
    closes = "".join(reversed(open_ones))
    try:
        return plain_json(text + closes)
    except ValueError:
        return plain_json(text[:last] + closes)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number

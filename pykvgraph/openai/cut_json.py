"""JSON that breaks off: what of it is certain."""

from __future__ import annotations

import json
import re
from typing import Any

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)|[][{},]', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}


def as_far_as_it_goes(text: str) -> Any:
    """The value of the beginning of a JSON text, with all that has ended there, as clients read a stream.

    A string, a constant or a member that has only begun is left out, and so is what is no JSON. Raises
    ValueError where nothing has begun that is, and RecursionError for what is nested too deeply.
    """
    open_ones: list[str] = []
    last, closes = 0, ""  # where something had ended, and what closes the text there
    for found in _STRINGS.finditer(text):
        sign = found[0]
        if sign in _CLOSES:
            open_ones.append(_CLOSES[sign])
            last, closes = found.end(), _closing(open_ones)
        elif sign == ",":
            last, closes = found.start(), _closing(open_ones)
        elif sign in "]}" and open_ones:
            open_ones.pop()
    try:
        return json.loads(text + _closing(open_ones))
    except ValueError:
        return json.loads(text[:last] + closes)


def _closing(open_ones: list[str]) -> str:
    return "".join(reversed(open_ones))

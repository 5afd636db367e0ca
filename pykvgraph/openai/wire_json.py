"""JSON in and out of the wire."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from pykvgraph.openai.errors import invalid

JSON_TYPE = b"application/json; charset=utf-8"
LOWEST = -3.4028234663852886e38  # what stands for the logarithm of 0, as JSON has no infinity


# Strings, arrays and objects of a body. Nobody else runs while json makes them, and Python's collector goes
# through all that there are again and again meanwhile: 20 million arrays take 9 seconds, 4 million names 7.
# A bias for each of 262,144 tokens, by its text, needs half of these.
_MOST_PARTS = 1 << 20
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def loads(data: bytes | bytearray) -> Any:
    """A body's value. Raises WireError for what is no JSON, and for more than 2^20 parts."""
    if data.count(b'"') // 2 + _n_brackets(data) > _MOST_PARTS and _n_parts(data) > _MOST_PARTS:
        raise invalid(f"the body has over {_MOST_PARTS} strings, arrays and objects: send less in a body")
    try:
        return json.loads(data.decode("utf-8"), parse_int=_int, parse_float=_float, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {error}") from None


def dumps(value: Any) -> bytes:
    """Without spaces; a half of a surrogate pair, which UTF-8 can't have, becomes `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def dumps_in_parts(value: Any, depth: int = 5) -> bytes:
    """As dumps(), of a value that is long: no other thread runs while one part of it is written.

    depth: of the arrays and objects whose parts are written one by one.
    Probabilities of a token are five deep.
    """
    if depth and isinstance(value, list):
        return b"[%b]" % b",".join([dumps_in_parts(each, depth - 1) for each in value])
    if depth and isinstance(value, dict):
        pairs = [b"%b:%b" % (dumps(name), dumps_in_parts(each, depth - 1)) for name, each in value.items()]
        return b"{%b}" % b",".join(pairs)
    return dumps(value)


def finite(value: float) -> float:
    """A logarithm that JSON can have."""
    return value if math.isfinite(value) else LOWEST


def _n_brackets(data: bytes | bytearray) -> int:
    return data.count(b"[") + data.count(b"{")


def _n_parts(data: bytes | bytearray) -> int:
    """Strings, and brackets that aren't in them; counted until they are over the limit."""
    n = end = 0
    for string in _STRING.finditer(data):
        n += 1 + _n_brackets(data[end : string.start()])
        end = string.end()
        if n > _MOST_PARTS:
            return n
    return n + _n_brackets(data[end:])


def _int(text: str) -> int:
    """A function of Python: while one is called other threads get their turn, which json gives to nobody.

    Reading a million numbers takes a good part of a second.
    """
    return int(text)


def _float(text: str) -> float:
    return float(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")

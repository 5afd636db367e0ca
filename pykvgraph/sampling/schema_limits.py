"""What a JSON schema may have: making it a grammar must take no longer than a moment.

To be asked before anything is made of the schema, whatever makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError

_LONGEST = 1 << 18  # characters of JSON
_DEEPEST = 128  # objects and arrays within each other
_NUMBERS = dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), 1 << 16)
_SIZES = {"enum": 1000, "properties": 256, "required": 1000, "type": 16}
_SIZES |= dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "items"), 256)
_MOST_PROPERTIES = 2000
# Of a grammar in which each repetition is written out, and each rule has the names of what it is in.
_LONGEST_GRAMMAR = 1 << 24  # characters
_PER_NAME, _PER_REPETITION = 16, 16  # how often a name is written; characters of a repetition beside the name
_BRACES = re.compile(r"\{([^{}]*)\}")


class _Part(NamedTuple):
    """A value in the schema. depth: how many others it is in. way: the length of their keys."""

    value: Any
    depth: int
    way: int


def check_schema(schema: Any, length: int) -> None:
    """Raises InvalidArgumentError, which names the keyword and its limit. length: of the schema's JSON."""
    _refuse_over("length", length, _LONGEST)
    n_largest = max((_n_properties(part.value) for part in _parts(schema)), default=0)
    n_properties = n_written = 0
    for part in _parts(schema):
        n_written += part.way * _PER_NAME
        if isinstance(part.value, dict):
            n_properties += _n_properties(part.value) + _n_of_all(part.value, n_largest)
            n_written += _n_repeated(part.value) * (part.way + _PER_REPETITION)
            for keyword, most in _SIZES.items():
                value = part.value.get(keyword)
                _refuse_over(keyword, len(value) if isinstance(value, (dict, list)) else 0, most)
    _refuse_over("properties, of all objects together,", n_properties, _MOST_PROPERTIES)
    what = f"the sum of {', '.join(_NUMBERS)} and {{m,n}}, times the length of names,"
    _refuse_over(what, n_written, _LONGEST_GRAMMAR)


def _parts(schema: Any) -> Iterator[_Part]:
    """All values of the schema. Raises InvalidArgumentError when they are too deep."""
    todo = [_Part(schema, 0, 0)]
    while todo:
        part = todo.pop()
        value = part.value
        if isinstance(value, (dict, list)):
            _refuse_over("depth", part.depth, _DEEPEST)
            items = value.items() if isinstance(value, dict) else (("", each) for each in value)
            todo += [_Part(each, part.depth + 1, part.way + len(key) + 1) for key, each in items]
        yield part


def _n_properties(schema: Any) -> int:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return len(properties) if isinstance(properties, dict) else 0


def _n_of_all(schema: dict[str, Any], n_largest: int) -> int:
    """Properties of an object that has those of others, by allOf. n_largest: of any object of the schema."""
    given = schema.get("allOf")
    parts = [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []
    for part in list(parts):
        choices = part.get("anyOf")
        parts += [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    n = sum(n_largest if "$ref" in part else _n_properties(part) for part in parts)
    _refuse_over("allOf's properties", n, _SIZES["properties"])
    return n


def _n_repeated(schema: dict[str, Any]) -> int:
    n = 0
    for keyword, most in _NUMBERS.items():
        value = schema.get(keyword)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _refuse_over(keyword, value, most)
            n += max(int(value), 0)
    pattern = schema.get("pattern")
    for inside in _BRACES.findall(pattern) if isinstance(pattern, str) else ():
        for number in inside.split(","):
            n_times = _times(number)
            _refuse_over("{m,n} of a pattern", n_times, _NUMBERS["maxLength"])
            n += n_times
    return n


def _times(text: str) -> int:
    """As Python reads the numbers of a pattern; 0 for what is none."""
    try:
        return max(int(text), 0)
    except ValueError:
        return 0


def _refuse_over(what: str, value: float, most: int) -> None:
    if not value <= most:  # NaN is too much, too
        raise InvalidArgumentError(f"json_schema: {what} is {shown(value)}, over the limit of {most}")

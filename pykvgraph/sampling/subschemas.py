"""The schemas that stand in a JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_SINGLE = (
    *("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Those that stand in it directly."""
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif key in _LISTS and isinstance(value, list):
            yield from value
        elif key in _SINGLE:
            yield value


def all_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all in it, without those that are true or false."""
    todo = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            yield each
            todo += _subschemas(each)


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy in which change() was made to those that stand in it directly."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            found[key] = {name: change(each) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            found[key] = [change(each) for each in value]
        else:
            found[key] = change(value) if key in _SINGLE else value
    return found

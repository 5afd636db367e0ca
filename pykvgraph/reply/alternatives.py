"""The walk through a schema's choices and references, for the grammar and for the reader of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SILENT = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
_MOST_FOLLOWED = 100  # choices and references
_CHOICES = ("anyOf", "oneOf")
_PLACES = frozenset((*_CHOICES, "allOf", "$ref", "$defs", "definitions"))


def alternatives(schema: Any, definitions: Any) -> list[Mapping[str, Any]]:
    """Schemas without choices and references, of which a value follows one; {} for what isn't understood.

    definitions: the schema that references begin in. Both are a client's, and may be anything.
    """
    return list(_followed(schema, definitions, [_MOST_FOLLOWED]))


def _followed(schema: Any, definitions: Any, left: list[int]) -> Iterator[Mapping[str, Any]]:
    left[0] -= 1
    if not isinstance(schema, dict) or left[0] < 0:
        yield {}
        return
    found: list[Mapping[str, Any]] = [{key: schema[key] for key in schema.keys() - _PLACES}]
    for choices in _groups(schema, definitions):
        ways = [each for choice in choices for each in _followed(choice, definitions, left)]
        if not ways or len(found) * len(ways) > _MOST_FOLLOWED:
            yield {}
            return
        found = [_both(one, other) for one in found for other in ways]
    yield from found


def _groups(schema: Mapping[str, Any], definitions: Any) -> Iterator[list[Any]]:
    """Lists of schemas; of each list one is followed."""
    for key in _CHOICES:
        if isinstance(schema.get(key), list):
            yield schema[key]
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        yield [each]
    if "$ref" in schema:
        yield [_resolved(schema["$ref"], definitions)]


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that is followed where both are; {} where that would need reckoning."""
    differs = any(one[key] != other[key] for key in (one.keys() & other.keys()) - SILENT)
    return {} if differs else {**other, **one}


def _resolved(reference: Any, definitions: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = definitions
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found

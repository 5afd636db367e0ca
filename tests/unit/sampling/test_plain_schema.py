"""JSON schemas in fewer keywords: the package jsonschema judges both the same."""

from __future__ import annotations

import itertools
from typing import Any

import jsonschema
import pytest

from pykvgraph.sampling.plain_schema import plain

AB = {"a": {"type": "integer"}, "b": {"type": "boolean"}}
VALUES: list[Any] = [
    *("", "ab", "abc", 1, 2.5, True, None, [], [1], [1, 1], [1, "x"], {}, {"a": 1}, {"a": "x"}, {"b": True}),
    *(
        {"a": 1, "b": False},
        {"c": 1},
        {"c": "x"},
        {"a": 1, "c": 2},
        {"x1": 3},
        {"x1": "y"},
        {"a": 1, "x1": 3},
    ),
]
# each with a word that is gone afterwards
SCHEMAS: list[tuple[str, dict[str, Any]]] = [
    ("propertyNames", {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}),
    ("propertyNames", {"propertyNames": True}),
    ("propertyNames", {"propertyNames": {"enum": ["a", "c"]}, "properties": AB}),
    ("propertyNames", {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "string"}}),
    ("propertyNames", {"propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}}),
    ("not", {"properties": {"a": {"not": {}}}}),
    ("not", {"type": "array", "items": {"not": True}}),
    ("uniqueItems", {"uniqueItems": False}),
    ("minContains", {"type": "array", "minContains": 2}),
    ("if", {"if": {"type": "string"}}),
    ("then", {"then": {"type": "string"}, "else": {"type": "null"}}),
    ("unevaluatedProperties", {"properties": AB, "unevaluatedProperties": False}),
    ("unevaluatedProperties", {"properties": AB, "unevaluatedProperties": {"type": "string"}}),
    ("unevaluatedProperties", {"additionalProperties": {"type": "string"}, "unevaluatedProperties": False}),
    ("unevaluatedProperties", {"anyOf": [{"properties": AB}, {}], "unevaluatedProperties": True}),
    ("unevaluatedItems", {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False}),
    ("unevaluatedItems", {"items": {"type": "integer"}, "unevaluatedItems": False}),
    ("dependentRequired", {"dependentRequired": {}}),
]


def judged(schema: Any) -> list[bool]:
    judge = jsonschema.Draft202012Validator(schema)
    return [judge.is_valid(value) for value in VALUES]


@pytest.mark.parametrize(("word", "schema"), SCHEMAS)
def test_what_says_the_same(word: str, schema: dict[str, Any]) -> None:
    found = plain(schema)
    assert word in str(schema) and word not in str(found)
    assert judged(found) == judged(schema)


def test_lengths_are_whole_numbers() -> None:
    """JSON has no others, and a program that writes 2.0 means 2."""
    for end, kind in itertools.product(("min", "max"), ("Length", "Items", "Properties")):
        assert repr(plain({f"{end}{kind}": 2.0})) == repr({f"{end}{kind}": 2})
        assert plain({f"{end}{kind}": 2.5}) == {f"{end}{kind}": 2.5}


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"uniqueItems": True},
        {"contains": {}, "minContains": 2},
        {"if": {}, "then": {"type": "string"}},
        {"propertyNames": {"maxLength": 3}},
        {"propertyNames": {"pattern": "^x"}, "properties": AB},
        {"propertyNames": {"enum": ["a"]}, "patternProperties": {"a": {}}},
        {"allOf": [{"properties": AB}], "unevaluatedProperties": False},
        {"dependentRequired": {"a": ["b"]}},
        {"if": {"properties": AB}, "unevaluatedProperties": False},
        {"items": [{"type": "integer"}], "unevaluatedItems": False},
        {"not": 1},
    ],
)
def test_what_nothing_else_says_stays(schema: dict[str, Any]) -> None:
    assert plain(schema) == schema

"""JSON schemas that would take seconds to become a grammar, and large ones that don't."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.sampling.schema_limits import check_schema


def check(schema: Any) -> None:
    check_schema(schema, len(json.dumps(schema)) if not _has_no_json(schema) else 100)


def _has_no_json(schema: Any) -> bool:
    try:
        json.dumps(schema)
    except RecursionError:
        return True
    return False


def deep(n: int, keyword: str = "items") -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "array", keyword: schema}
    return schema


def with_properties(n: int, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(n)}, **others}


def in_many(schema: Any, n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"q{i}": schema for i in range(n)}}


NUMBERS = ("minItems", "maxItems", "minLength", "maxLength")
TOO_LARGE: list[tuple[str, Any]] = [
    *((name, {"type": "array", "items": {}, name: 10**6}) for name in NUMBERS),
    *((name, {"type": "array", "items": {}, name: 1e6}) for name in NUMBERS),  # JSON's 1e6
    *((name, in_many({"anyOf": [{name: 65_537}]}, 2)) for name in NUMBERS),
    ("minItems", {"minItems": float("inf")}),
    ("minItems", {"minItems": 10**400}),
    ("{m,n}", {"type": "string", "pattern": "^a{1000000}$"}),
    ("{m,n}", {"type": "string", "pattern": "^a{0,1000000}$"}),
    ("{m,n}", {"type": "string", "pattern": "^(a{2}){ 1_000_000 ,}$"}),
    ("enum", {"enum": list(range(1001))}),
    ("required", with_properties(3, required=[f"p{i}" for i in range(5000)])),
    ("properties", with_properties(257)),
    ("properties", in_many(with_properties(200), 20)),
    ("allOf", {"$defs": {"a": with_properties(200)}, "allOf": [{"$ref": "#/$defs/a"}] * 4}),
    ("allOf", {"$defs": {"a": with_properties(200)}, "allOf": [{"anyOf": [{"$ref": "#/$defs/a"}] * 4}]}),
    ("anyOf", {"anyOf": [{"type": "integer"}] * 300}),
    ("oneOf", {"oneOf": [{"type": "integer"}] * 300}),
    ("prefixItems", {"prefixItems": [{}] * 300}),
    ("depth", deep(200)),
    ("depth", deep(100_000)),
    ("depth", {"default": [[deep(150)]]}),
    ("length", {"enum": ["a" * (1 << 18)]}),
    # each is within its limit, and all of them together are not
    ("minLength", in_many({"type": "string", "minLength": 60_000}, 30)),
    ("names", {"properties": {"x" * 100_000: {"type": "array", "items": {}, "minItems": 10_000}}}),
    ("names", {"properties": {"x" * 100_000: with_properties(200)}}),
]


@pytest.mark.parametrize(("named", "schema"), TOO_LARGE, ids=[str(i) for i in range(len(TOO_LARGE))])
def test_what_is_too_large_is_named(named: str, schema: Any) -> None:
    begin = time.process_time()
    with pytest.raises(InvalidArgumentError, match=r"over the limit of [0-9]+$") as caught:
        check(schema)
    assert named in str(caught.value)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string", "minLength": 65_536},
        {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 65_536.0},
        in_many({"type": "string", "maxLength": 65_535}, 5),
        {"enum": list(range(1000))},
        with_properties(256, required=[f"p{i}" for i in range(256)]),
        deep(60),
        {"type": "string", "pattern": "^[a-z]{1,255}@[a-z]{1,255}[.][a-z]{2,63}$"},
        {"properties": {name: {"type": "integer"} for name in (*NUMBERS, "enum", "pattern", "properties")}},
        {"minItems": True, "enum": 5, "properties": [], "allOf": {}, "anyOf": None, "pattern": 7},
        {"minItems": "1000000", "required": "p" * 2000},
        {"minItems": -(10**400)},
    ],
)
def test_what_is_large_or_odd_is_let_through(schema: Any) -> None:
    check(schema)

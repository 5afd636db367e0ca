"""Answers of SmolLM2 that follow a schema: what people have models say, and valid to the letter."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from support import chance
from support.engines import open_context
from support.real import prompt_of

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_SEEDS = 20 if chance.THOROUGH else 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "nullable": True},
        "likes": {"type": "array", "items": {"enum": ["tea", 'the "sea"', "a\\b"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "email", "likes", "home"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
        }
    },
}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("Invent a person, as JSON.", PERSON),
    (
        "Write a poem of four lines about the sea, as JSON.",
        {
            "type": "object",
            "properties": {"poem": {"type": "string", "maxLength": 300}},
            "required": ["poem"],
        },
    ),
    (
        "Give three numbers below ten, as a JSON list.",
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 3,
            "maxItems": 3,
        },
    ),
    ("Is water wet?", {"oneOf": [{"const": "yes"}, {"const": "no"}, {"type": "null"}]}),
    (
        "When does the year 2031 begin?",
        {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]},
    ),
]


@pytest.mark.parametrize(("question", "schema"), ASKED, ids=[question for question, _ in ASKED])
def test_answers_are_valid(smollm2: kvg.Model, question: str, schema: dict[str, Any]) -> None:
    judge = jsonschema.Draft202012Validator(_plain(schema), format_checker=jsonschema.FormatChecker())
    prompt = prompt_of(smollm2, [{"role": "user", "content": question}])
    n_ended = 0
    with open_context(smollm2, n_ctx=1024) as ctx:
        for seed in range(N_SEEDS):
            ctx.reset()
            pieces = list(
                kvg.generate(ctx, prompt, max_tokens=250, temperature=1.0, seed=seed, json_schema=schema)
            )
            if len(pieces) < 250:
                judge.validate(json.loads("".join(piece.text for piece in pieces)))
                n_ended += 1
    assert n_ended >= N_SEEDS // 2


def _plain(schema: Any) -> Any:
    """The same in JSON Schema, which has no `nullable`."""
    if isinstance(schema, dict):
        found = {key: _plain(value) for key, value in schema.items() if key != "nullable"}
        return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found
    return [_plain(each) for each in schema] if isinstance(schema, list) else schema

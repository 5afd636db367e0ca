"""JSON schemas, Lark and regular expressions: answers are what they ask for, or they are refused by name.

The judge is the package jsonschema.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support import chance, where

import pykvgraph as kvg

N_SEEDS = 75 if chance.THOROUGH else 6  # with all schemas 2,000 answers
LETTERS = {"backslash": "C:\\new\\tab", "quote": 'say "yes"', "line break": "one\ntwo", "emoji": "good 😀"}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["v", "next"],
}


def of(**properties: Any) -> dict[str, Any]:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


OBEYED: dict[str, dict[str, Any]] = {
    **{f"enum, {name}": of(v={"enum": [text, "b"]}) for name, text in LETTERS.items()},
    **{f"const, {name}": of(v={"const": text}) for name, text in LETTERS.items()},
    **{f"key, {name}": of(**{text: {"type": "boolean"}}) for name, text in LETTERS.items()},
    "bounds": of(
        a={"type": "integer", "minimum": -3, "maximum": 1200},
        b={"type": "integer", "exclusiveMinimum": 7, "maximum": 9},
    ),
    "numbers": of(
        a={"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        b={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    ),
    "allOf of a reference": {
        **of(c={"allOf": [{"$ref": "#/$defs/C"}], "default": "red"}),
        "$defs": {"C": {"enum": ["red", "blue"], "type": "string"}},
    },
    "allOf of objects": {"allOf": [of(a={"enum": [1, 2]}), of(b={"type": "boolean"})]},
    "reference into an array": {
        **of(
            size={"anyOf": [{"enum": ["s", "l"]}, {"type": "null"}]},
            other={"$ref": "#/properties/size/anyOf/0"},
        )
    },
    "reference to itself": {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    "definitions of one name": {
        **of(a={"$ref": "#/$defs/x"}, b={"$ref": "#/definitions/x"}),
        "$defs": {"x": {"const": 1}},
        "definitions": {"x": {"const": "one"}},
    },
    "names with slashes": {**of(a={"$ref": "#/$defs/a~1b"}), "$defs": {"a/b": {"enum": [3]}}},
    "no type": of(a={"enum": [None, True, 2.5, [1], {"x": "y"}]}),
    "types": of(a={"type": ["boolean", "null"]}),
    "union by a constant": {
        "oneOf": [
            of(kind={"const": "a"}, n={"type": "integer", "minimum": 0, "maximum": 9}),
            of(kind={"const": "b"}, t={"type": "boolean"}),
        ]
    },
    "tuple": of(
        a={
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"enum": ["x"]}],
            "items": False,
            "minItems": 2,
        }
    ),
    "list": of(a={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
    "lengths": of(a={"type": "string", "minLength": 2, "maxLength": 6}),
    "pattern": of(a={"type": "string", "pattern": "^[A-Z]{2}-\\d{3}/(a|b)$"}),
    "format": of(a={"type": "string", "format": "date"}, b={"type": "string", "format": "uuid"}),
    "left out": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["b"],
    },
    "other properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 1,
    },
    "string": {"type": "string", "maxLength": 8},
    "record": of(
        a={
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 2.0,
        }
    ),
    "names of a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^x[0-9]$"},
        "additionalProperties": {"enum": [1, None]},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "never others": {**of(a={"enum": ["b"]}), "additionalProperties": {"not": {}}},
    "unevaluated": {**of(a={"type": "boolean"}), "unevaluatedProperties": False},
    "array": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
}
REFUSED: dict[str, Any] = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "zzz": {"type": "string", "format": "zzz"},
    "look-around": {"type": "string", "pattern": "^(?=a)b"},
    "nowhere": {"$ref": "#/$defs/nowhere"},
    "no text follows": {"$ref": "#"},
    "nonsense": {"type": "nonsense"},
    "be obeyed": {"enum": [-(2**63)]},  # llguidance's process ends of it
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
}


@pytest.fixture(scope="module")
def ctx(stories: Path) -> Iterator[kvg.Context]:
    with kvg.Model(stories, device=where.device) as model, kvg.Context(model, n_ctx=1024) as ctx:
        yield ctx


def said(ctx: kvg.Context, seed: int, **rules: Any) -> str | None:
    """What a model without preferences says; None: it has not ended."""
    rng = np.random.default_rng(chance.number(seed))
    tokenizer = ctx.model.tokenizer
    sampler = kvg.Sampler(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, tokenizer=tokenizer, **rules
    )
    data = b""
    for _ in range(250):
        token = sampler.sample(rng.normal(size=tokenizer.n_vocab).astype(np.float32))
        if tokenizer.is_eog(token):
            return data.decode()
        data += tokenizer.token_to_piece(token)
    return None


@pytest.mark.parametrize("name", OBEYED)
def test_answers_are_valid(ctx: kvg.Context, name: str) -> None:
    """Of a model that says anything that it may, and of one that tells stories."""
    schema = OBEYED[name]
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    answers = [said(ctx, seed, json_schema=schema) for seed in range(N_SEEDS)]
    for seed in range(2):
        ctx.reset()
        pieces = kvg.generate(ctx, "JSON:", max_tokens=250, temperature=0.8, seed=seed, json_schema=schema)
        answers.append("".join(piece.text for piece in pieces))
        answers[-1] = answers[-1] if ctx.kv.n_used < 250 else None
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) >= 3, answers
    for answer in ended:
        judge.validate(json.loads(answer))
        assert not re.search(r"[\n ]{24}", answer)  # white space has an end


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_obeyed_is_named(ctx: kvg.Context, name: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=f"(?s)obeyed.*{name}|{name}"):
        kvg.Sampler(json_schema=REFUSED[name], tokenizer=ctx.model.tokenizer)


def test_nullable_is_openapis(ctx: kvg.Context) -> None:
    schema = of(a={"type": "boolean", "nullable": True}, b={"$ref": "#/$defs/B", "nullable": True})
    schema["$defs"] = {"B": {"enum": [1, 2]}}
    answers = [json.loads(said(ctx, seed, json_schema=schema) or "{}") for seed in range(40)]
    assert {repr(each.get("a")) for each in answers} >= {"True", "False", "None"}
    assert {each.get("b") for each in answers} == {1, 2, None}


@pytest.mark.parametrize("grammar", ["start: /[0-9]{3}-[a-f]+/", "start: A | B\nA: /x{3}/\nB: /y{4}/"])
def test_lark(ctx: kvg.Context, grammar: str) -> None:
    found = {said(ctx, seed, grammar=f"%llguidance {{}}\n{grammar}") for seed in range(20)} - {None}
    assert found
    assert all(re.fullmatch(r"[0-9]{3}-[a-f]+|x{3}|y{4}", text or "") for text in found)
    with pytest.raises(kvg.InvalidArgumentError, match="nothing"):
        said(ctx, 1, grammar="%llguidance {}\nstart: nothing")


EXPLODE: dict[str, Any] = {
    "repeated groups": {"type": "string", "pattern": "^((a{1,200}){1,200}){1,200}$"},
    "any of 300 before": {"type": "string", "pattern": "^[ab]*a[ab]{300}$"},
    "references by the power": {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
        | {"d40": {"type": "object"}},
        "$ref": "#/$defs/d0",
    },
    "choices by the power": {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(12)]}
            for i in range(8)
        ]
    },
    "long": {"type": "string", "minLength": 60_000, "maxLength": 65_536},
    "lists of lists": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "string"}, "minItems": 60_000},
        "minItems": 5,
    },
    "large bounds": {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
}


@pytest.mark.parametrize("name", EXPLODE)
def test_what_could_explode(ctx: kvg.Context, name: str) -> None:
    """It is refused, or its tokens come at once."""
    begun = time.process_time()
    tokenizer = ctx.model.tokenizer
    try:
        sampler = kvg.Sampler(json_schema=EXPLODE[name], tokenizer=tokenizer, temperature=1.0)
        for seed in range(20):
            row = np.random.default_rng(seed).normal(size=tokenizer.n_vocab).astype(np.float32)
            if tokenizer.is_eog(sampler.sample(row)):
                break
    except kvg.InvalidArgumentError as refused:
        assert "obeyed" in str(refused) or "over the limit" in str(refused)
    assert time.process_time() - begun < 2

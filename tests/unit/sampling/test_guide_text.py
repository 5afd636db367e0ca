"""Schemas and texts as llguidance is to read them."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.reply.raw_texts import RawText, raw_text
from pykvgraph.sampling.guide_text import DATE, json_of, literal, or_object, regex


def read(schema: Any) -> Any:
    found = json.loads(json_of(schema))
    found.pop("x-guidance")
    return found


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "additionalProperties": False}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),
        # a property of this name is no list of properties
        ({"enum": [{"properties": {"a": 1}}]}, {"enum": [{"properties": {"a": 1}}]}),
        (
            {"properties": {"properties": {"type": "string"}}},
            {"properties": {"properties": {"type": "string"}}, "additionalProperties": False},
        ),
        (
            {"items": {"properties": {"a": True}, "additionalProperties": True}},
            {"items": {"properties": {"a": True}, "additionalProperties": True}},
        ),
        ({"type": "string", "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        (True, {}),
        (False, {"enum": []}),
        ({}, {}),
    ],
)
def test_what_else_an_object_has(schema: Any, expected: Any) -> None:
    assert read(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}}}},
    ],
)
def test_objects_that_are_put_together_stay_open(schema: Any) -> None:
    assert read(schema) == schema


def test_one_schema_in_allof_is_that_schema() -> None:
    found = read(
        {"properties": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}}, "$defs": {"b": {"properties": {"x": {}}}}}
    )
    assert found["additionalProperties"] is found["$defs"]["b"]["additionalProperties"] is False


def test_what_is_no_schema() -> None:
    with pytest.raises(InvalidArgumentError, match="must be an object, got 5"):
        json_of(5)
    assert or_object({}) == {"type": "object"} and or_object({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a/b", r"/a\/b/"),
        (r"a\/b", r"/a\/b/"),
        (r"\d\w[\d]", "/[0-9][0-9A-Za-z_][[0-9]]/"),
        (r"\\d", r"/\\d/"),
        ("a\nb", r"/a\nb/"),
    ],
)
def test_a_regular_expression_in_lark(pattern: str, expected: str) -> None:
    assert regex(pattern) == expected


def test_a_text_in_lark() -> None:
    assert literal('say "yes"\n\\ é') == '"say \\"yes\\"\\n\\\\ é"'


DEFINITIONS = {
    "$defs": {"m": {"enum": ["edit", "view"]}, "loop": {"$ref": "#/$defs/loop"}, "s": {"type": "string"}}
}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, RawText()),
        ({"type": ["string"]}, RawText()),
        ({"const": "a"}, RawText(("a",))),
        ({"$ref": "#/$defs/m"}, RawText(("edit", "view"))),
        ({"allOf": [{"$ref": "#/$defs/m"}]}, RawText(("edit", "view"))),
        ({"anyOf": [{"enum": ["a"]}, {"oneOf": [{"const": "b"}]}]}, RawText(("a", "b"))),
        ({"anyOf": [{"const": "a"}, {"type": "string"}]}, RawText()),
        ({"type": "string", "pattern": "^ed[a-z]t$"}, RawText(regex="/(ed[a-z]t)/")),
        ({"type": "string", "pattern": "b"}, RawText(regex="/(?s:.*)(b)(?s:.*)/")),
        ({"type": "string", "maxLength": 4}, RawText(regex='/(?s:.{0,4})/ & /[^"](?s:.*)|/')),
        ({"type": "string", "maxLength": 4.0}, RawText(regex='/(?s:.{0,4})/ & /[^"](?s:.*)|/')),
        ({"type": "string", "maxLength": None}, RawText()),
        # what stands beside a choice or a reference holds in each
        (
            {"type": "string", "anyOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]},
            RawText(regex="/(a)/ | /(b)/"),
        ),
        ({"$ref": "#/$defs/s", "maxLength": 3}, RawText(regex='/(?s:.{0,3})/ & /[^"](?s:.*)|/')),
        ({"anyOf": [{"const": ""}, {"type": "string", "pattern": "^x$"}]}, RawText(regex='"" | /(x)/')),
        (
            {"anyOf": [{"const": "a\nb"}, {"type": "string", "pattern": "^x$"}]},
            RawText(regex='"a\\nb" | /(x)/'),
        ),
        (
            {"allOf": [{"type": "string"}, {"maxLength": 3}]},
            RawText(regex='/(?s:.{0,3})/ & /[^"](?s:.*)|/'),
        ),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, None),
        ({"type": "string", "anyOf": []}, None),
        ({"type": "string", "nullable": True}, None),
        ({"type": ["string", "null"]}, None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, None),
        ({"enum": ["a", 1]}, None),
        ({"enum": 5}, None),
        ({}, None),
        (5, None),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/nowhere"}, None),
    ],
)
def test_what_is_a_text_without_quotes(schema: Any, expected: RawText | None) -> None:
    assert raw_text(schema, DEFINITIONS) == expected


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"format": ["date"]}, "format"),
        ({"format": "zzz"}, "format 'zzz'"),
        ({"maxLength": True}, "maxLength must be"),
        ({"maxLength": 2.5}, "maxLength must be"),
        ({"minLength": '9})/ | /(?s:.*"'}, "minLength must be"),
        ({"maxLength": -1}, "maxLength must be"),
        ({"not": {"const": "a"}}, "obeyed: not"),
    ],
)
def test_what_a_text_without_quotes_can_not_obey(more: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        raw_text({"type": "string", **more}, DEFINITIONS)


def test_signs_behind_a_backslash() -> None:
    assert regex("a\\\nb\\\r") == r"/a\nb\r/" and literal("\x7f") == '"\\u007f"'


def test_a_property_that_must_be_and_is_not_listed() -> None:
    schema = {"properties": {"a": {}}, "required": ["a", "b"]}
    assert read(schema) == schema


def test_days_that_there_are() -> None:
    """Beside Python's calendar."""
    for year in (1, 4, 100, 400, 1863, 1900, 1904, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date(year, month, day)
                except ValueError:
                    assert not re.fullmatch(DATE, text), text
                else:
                    assert re.fullmatch(DATE, text), text
    assert not re.fullmatch(DATE, "0000-01-01")
    assert read({"type": "string", "format": "date"}) == {"type": "string", "pattern": f"^{DATE}$"}

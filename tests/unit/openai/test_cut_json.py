"""JSON that breaks off, beside the parser that the packages of OpenAI and Anthropic read streams with."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jiter import from_json

from pykvgraph.openai.cut_json import as_far_as_it_goes, plain_json

VALUES: list[Any] = [
    {},
    {"city": "Oslo", "note": ""},
    {"a": [1, -2.5e3, True, None, 'x\\y"z,{[', []], "b": {"c": {}, "é": "\U0001f600"}},
    [{"x": 1}, {"y": [{"z": "}"}]}, [[2]]],
    {"a": {"b": {"c": "d, e: {f"}}},
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("space", [None, 1])
def test_each_place(value: Any, space: int | None) -> None:
    text = json.dumps(value, indent=space, ensure_ascii=False)
    assert as_far_as_it_goes(text) == value
    for end in range(1, len(text)):
        cut = text[:end]
        assert as_far_as_it_goes(cut) == from_json(cut.encode(), partial_mode=True), cut


@pytest.mark.parametrize("text", ["", "x", "]", '"x', "tru"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        as_far_as_it_goes(text)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": True}', '{"a": 1'])
def test_what_is_no_json(text: str) -> None:
    """A call with such arguments is told as it is: it would be called without them."""
    with pytest.raises(ValueError):
        plain_json(text)

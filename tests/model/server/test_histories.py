"""Calls in a conversation so far, as clients keep them: each template writes them, whatever their form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.written_calls import TEMPLATES, WITH_CALLS

import pykvgraph as kvg
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.server.requests.chat_template import ServerTemplate

GIVEN = '{"city": "lemon", "days": 77123, "more": [1, {"a": null}]}'
AS_TEXT = [GIVEN, '{"city":"lemon","days":77123,\n"more":[1,{"a":null}]}']
NOTHING: list[Any] = ["{}", {}, None, "", "null"]
BROKEN = ['{"city": "zebra', '["zebra"]', "zebra", '{"city": NaN, "zebra": 1}']
IDS = ["call_AbCdEfGhIjKlMnOpQrStUvWx", "toolu_01A09q90qw90lq917835lq9", "abcdefgh1", "functions.f:0", "0"]


@pytest.fixture(scope="module")
def vocabulary(stories: Path) -> Iterator[tuple[kvg.Model, Vocabulary]]:
    with kvg.Model(stories, device="cpu") as model:
        yield model, Vocabulary(model)


def history(arguments: Any, id: str = "abcdefgh1") -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    return [
        {"role": "user", "content": "Q?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": id, "content": "quartz"},
    ]


@pytest.mark.parametrize("name", WITH_CALLS)
def test_arguments_in_any_form(vocabulary: tuple[kvg.Model, Vocabulary], name: str) -> None:
    template = ServerTemplate(TEMPLATES[name], *vocabulary)

    def prompt(arguments: Any, id: str = "abcdefgh1") -> str:
        return template.prompt(history(arguments, id)).text

    whole = prompt(GIVEN)
    assert all(word in whole for word in ("get_weather", "lemon", "77123", "quartz"))
    assert len({re.sub(r"\s", "", prompt(each)) for each in AS_TEXT}) == 1
    assert len({prompt(each) for each in NOTHING}) == 1
    assert "lemon" not in prompt(None)
    for broken in BROKEN:
        assert "zebra" in prompt(broken) and "quartz" in prompt(broken)
    for id in IDS:
        assert "quartz" in prompt(GIVEN, id)

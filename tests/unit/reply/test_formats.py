"""The table of formats: each row has a file of replies, as the models that it is for write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pykvgraph.reply.delta import Reply
from pykvgraph.reply.format import Format
from pykvgraph.reply.formats import CALLS, THINKING
from pykvgraph.reply.parser import ReplyParser

REPLIES = Path(__file__).parents[2] / "data" / "replies"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = [
    tool("get_weather", city=TEXT, days={"type": "integer"}),
    tool("get_time", city=TEXT),
    tool("list_files"),
    tool("write_file", path=TEXT, text=TEXT),
    tool("merge", files={"type": "array", "items": TEXT}, how={"type": "object"}),
]


def replies(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((REPLIES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def read(name: str, reply: dict[str, Any], *pieces: str) -> Reply:
    calls = next(each for each in CALLS if each.name == name)
    thinking = next((each for each in THINKING if each.open == reply.get("thinking")), None)
    parser = ReplyParser(
        Format(thinking, calls, calls.headers),
        TOOLS,
        reply.get("prompt", ""),
        new_id=iter("abcdefgh").__next__,
    )
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return Reply.of([*deltas, *parser.end()])


def test_each_row_has_a_file_and_each_file_a_row() -> None:
    names = [each.name for each in CALLS]
    assert sorted(names) == sorted(path.stem for path in REPLIES.iterdir())
    assert len(set(names)) == len(names)
    assert all(len(replies(name)) > 1 for name in names)


@pytest.mark.parametrize("name", [each.name for each in CALLS])
def test_replies_of_a_format(name: str) -> None:
    """Whole, letter by letter, and cut in two at each place."""
    for reply in replies(name):
        said = "\n".join(reply["said"])
        whole = read(name, reply, said)
        calls = [[each.name, json.loads(each.arguments)] for each in whole.calls]
        assert json.dumps(calls) == json.dumps(reply["calls"]), said
        assert (whole.content, whole.reasoning) == (reply.get("content", ""), reply.get("reasoning", "")), (
            said
        )
        assert read(name, reply, *said) == whole
        for n in range(len(said)):
            assert read(name, reply, said[:n], said[n:]) == whole, n

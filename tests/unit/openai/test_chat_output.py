"""What a sample says of a call whose beginning was given to it."""

from __future__ import annotations

from typing import Any

import pytest

from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.reply.format import Format
from pykvgraph.reply.formats import CALLS
from pykvgraph.reply.parser import ReplyParser

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
JSON = '<tool_call>\n{"name": "weather", "arguments":'
TAGS = "<tool_call>\n<function=weather>\n"


def output_of(format: str, begun: str, called: str = "weather") -> ChatOutput:
    calls = next(each for each in CALLS if each.name == format)
    return ChatOutput(ReplyParser(Format(None, calls), TOOLS), begun, called=called)


@pytest.mark.parametrize(
    ("format", "begun", "said", "arguments"),
    [
        ("hermes", JSON, "", ""),
        ("hermes", JSON, " ", ""),
        ("hermes", JSON, " {", "{"),
        ("hermes", JSON, ' {"city": "Os', '{"city": "Os'),
        ("hermes", JSON, ' {"city": "Oslo"}}\n', '{"city": "Oslo"}'),
        ("qwen3-coder", TAGS, "", ""),
        ("qwen3-coder", TAGS, "<parameter=ci", ""),
        ("qwen3-coder", TAGS, "<parameter=city>\nOs", '{"city": "Os'),
        ("qwen3-coder", TAGS, "<parameter=city>\nOslo\n</parameter>\n</function>\n", '{"city": "Oslo"}'),
    ],
)
def test_the_call_is_told_wherever_its_text_breaks_off(
    format: str, begun: str, said: str, arguments: str
) -> None:
    for pieces in ([said], [*said]):
        output = output_of(format, "Well. " + begun)
        deltas: list[Any] = [delta for piece in pieces for delta in output.feed(piece)]
        deltas += output.end()
        reply = output.reply
        assert [(call.name, call.arguments) for call in reply.calls] == [("weather", arguments)]
        assert (reply.content, reply.reasoning) == ("Well.", "")
        assert output.finish_reason("stop") == "tool_calls" and reply.calls[0].id


def test_a_call_that_nobody_promised_stays_what_was_said() -> None:
    output = output_of("hermes", JSON, called="")
    output.feed(" ")
    output.end()
    assert not output.reply.calls and output.reply.content.startswith("<tool_call>")

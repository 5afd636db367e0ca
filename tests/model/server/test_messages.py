"""/v1/messages, asked by Anthropic's own package."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.shared import ErrorType

from pykvgraph.errors import KVGraphError
from pykvgraph.openai.errors import (
    as_wire,
    error_body,
    invalid,
    no_room,
    not_found,
    unavailable,
    unsupported,
)

from .test_chat import SCHEMA, begun

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"name": "weather", "description": "Tells.", "input_schema": SCHEMA}]
NO_THOUGHTS: Any = {"type": "disabled"}
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the package knows no temperature any more


@pytest.fixture
def claude(thinker: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker, api_key="none", max_retries=0) as client:
        yield client


def chat_text(chats: httpx.Client, **fields: Any) -> Any:
    """What /v1/chat/completions says to the same."""
    body = {"messages": HI, "temperature": 0, "max_tokens": 24, **fields}
    return chats.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]


@pytest.mark.client("anthropic", "an answer")
@pytest.mark.client("anthropic", "how many tokens a body has")
def test_it_says_what_a_chat_says(claude: anthropic.Anthropic, chats: httpx.Client) -> None:
    said = claude.messages.create(
        model="any", max_tokens=24, messages=HI, thinking=NO_THOUGHTS, system="Be short.", **GREEDY
    )
    messages = [{"role": "system", "content": "Be short."}, *HI]
    wanted = chat_text(chats, messages=messages, reasoning_effort="none")["content"]
    assert [block.to_dict() for block in said.content] == [{"type": "text", "text": wanted}]
    assert (said.role, said.stop_reason, said.stop_sequence) == ("assistant", "max_tokens", None)
    assert said.usage.output_tokens == 24
    counted = claude.messages.count_tokens(
        model="any", messages=HI, thinking=NO_THOUGHTS, system="Be short."
    ).input_tokens
    assert counted == said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)


@pytest.mark.client("anthropic", "a stream, and its usage")
@pytest.mark.client("anthropic", "thoughts")
def test_a_stream_adds_up(claude: anthropic.Anthropic, chats: httpx.Client) -> None:
    """Thoughts, and text behind them, which the request has begun."""
    asked: Any = {"model": "any", "max_tokens": 24, "messages": begun("So"), **GREEDY}
    wanted = chat_text(chats, messages=begun("So"))["content"]
    with claude.messages.stream(**asked) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == wanted and said.startswith("So")
    assert [block.to_dict() for block in final.content] == [{"type": "text", "text": wanted}]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 24
    thoughts = claude.messages.create(**asked | {"messages": HI}).content
    assert [block.type for block in thoughts] == ["thinking"]
    assert thoughts[0].thinking == chat_text(chats)["reasoning_content"]
    assert thoughts[0].signature, "clients leave thoughts without one out of the history"


def test_blocks_follow_each_other(chats: httpx.Client) -> None:
    """Each is opened, goes on and is closed before the next one."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    content = [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": f"I ask. {call}"}]
    messages = [*HI, {"role": "assistant", "content": content}]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 1, "stream": True}
    lines = chats.post("/v1/messages", json=body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    starts = [line.partition('"content_block":')[2] for line in lines if "content_block_start" in line]
    kinds = [start.split('"')[3] for start in starts if start]
    assert kinds[:3] == ["thinking", "text", "tool_use"]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    opened = 0
    for name in names[1:-2]:
        opened += {"content_block_start": 1, "content_block_stop": -1}.get(name, 0)
        assert opened == (name != "content_block_stop")


@pytest.mark.client("anthropic", "a forced call of a tool, and its result")
@pytest.mark.client("anthropic", "a forced call in a stream")
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_is_forced(claude: anthropic.Anthropic, choice: Any, streams: bool) -> None:
    asked: Any = {"model": "any", "max_tokens": 300, "messages": HI, "tools": TOOLS, "tool_choice": choice}
    asked |= {"thinking": NO_THOUGHTS, **GREEDY}
    if streams:
        with claude.messages.stream(**asked) as stream:
            said = stream.get_final_message()
    else:
        said = claude.messages.create(**asked)
    (block,) = said.content
    assert said.stop_reason == "tool_use" and block.type == "tool_use"
    given: Any = block.input
    assert block.name == "weather" and given["city"] in ("Oslo", "Rome") and isinstance(given["warm"], bool)
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "warm"}
    history: Any = [
        *HI,
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    again = claude.messages.create(**asked | {"messages": history, "tool_choice": {"type": "none"}})
    assert again.stop_reason != "tool_use"


def test_a_stop_string_ends_it(claude: anthropic.Anthropic) -> None:
    said = claude.messages.create(
        model="any", max_tokens=40, messages=HI, thinking=NO_THOUGHTS, stop_sequences=["very"], **GREEDY
    )
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "very")


def test_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        claude.messages.create(model="any", max_tokens=2, messages=HI, extra_body={"temperature": "hot"})
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    long: Any = [{"role": "user", "content": "word " * 600}]
    with (
        pytest.raises(anthropic.BadRequestError, match="prompt is too long") as caught,
        claude.messages.stream(model="any", max_tokens=2, messages=long) as stream,
    ):
        stream.get_final_message()
    assert caught.value.type == "invalid_request_error"


def test_errors_are_of_kinds_that_anthropic_has() -> None:
    kinds = set(typing.get_args(ErrorType))
    told = [
        no_room(9, 8),
        unsupported(""),
        unavailable(""),
        not_found(),
        as_wire(KVGraphError("")),
        invalid(""),
    ]
    for error in told:
        assert error_body("/v1/messages", error)["error"]["type"] in kinds

"""A call in a stream: its name and id first, then its arguments in parts."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response
from support.served import events

NAMES = {"type": "array", "items": {"enum": ["a"]}, "maxItems": 2}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "names": NAMES},
    "required": ["city", "names"],
}
# the model may say nothing else
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "names": ["a", "</tool_call>"]}}'
BOTH = CALL + "</tool_call>" + '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
GIVEN = {"city": "Oslo", "names": ["a", "</tool_call>"]}
WHOLE = '{"city": "Oslo", "names": ["a", "</tool_call>"]}'
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 300,
    "temperature": 0,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


def begun(said: str) -> list[dict[str, str]]:
    """The request's last message begins the answer, so that it certainly calls."""
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]


def streamed(chats: httpx.Client, **fields: Any) -> list[Any]:
    reply = chats.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "stream": True, **fields})
    *chunks, done = events(reply.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return chunks


def calls_of(chunks: list[Any]) -> tuple[list[Any], int]:
    """Put together, and in how many parts."""
    calls: list[Any] = []
    parts = [part for each in chunks for part in each["choices"][0]["delta"].get("tool_calls", ())]
    for part in parts:
        if part["index"] == len(calls):
            assert part["type"] == "function" and part["function"]["arguments"] == ""
            calls.append([part["id"], part["function"]["name"], ""])
        else:
            assert part["index"] == len(calls) - 1
            assert (part.keys(), part["function"].keys()) == ({"index", "function"}, {"arguments"})
            calls[-1][2] += part["function"]["arguments"]
    return calls, len(parts)


def test_a_forced_call_comes_in_parts(chats: httpx.Client) -> None:
    fields = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 3}
    ((_, name, arguments),), n_parts = calls_of(streamed(chats, **fields))
    body = {**CHAT, "tools": TOOLS, **fields}
    told = chats.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"][0]
    assert (name, arguments) == (told["function"]["name"], told["function"]["arguments"])
    assert json.loads(arguments)["city"] in ("Oslo", "Rome")
    assert n_parts > len(arguments) // 4  # a token of this model has few letters


@pytest.mark.parametrize("one", [False, True])
def test_several_calls(chats: httpx.Client, one: bool) -> None:
    chunks = streamed(chats, messages=begun(BOTH), max_tokens=2, parallel_tool_calls=not one)
    calls, _ = calls_of(chunks)
    wanted = [("weather", WHOLE), ("stop", "{}")][: 1 if one else 2]
    assert [(name, arguments) for _, name, arguments in calls] == wanted
    assert len({id for id, *_ in calls}) == len(calls)


def test_a_call_that_breaks_off(chats: httpx.Client) -> None:
    """The answer's tokens run out within it: its arguments are as far as they came, and `length` says so."""
    said = CALL[: CALL.index("Oslo") + 2]
    chunks = streamed(chats, messages=begun(said), max_tokens=1)
    ((_, name, arguments),), _ = calls_of(chunks)
    assert name == "weather" and arguments.startswith('{"city": "Os')
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    body = {**CHAT, "tools": TOOLS, "messages": begun(said), "max_tokens": 1}
    told = chats.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert told["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    assert (told["finish_reason"], told["message"]["content"]) == ("length", "")


def of_claude(**fields: Any) -> dict[str, Any]:
    functions = [each["function"] for each in TOOLS]
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    return {**CHAT, "model": "m", "tools": tools, **fields}


def test_blocks_of_anthropics(chats: httpx.Client) -> None:
    """Its own client puts the parts together."""
    url = str(chats.base_url).rstrip("/")
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    body = of_claude(messages=begun(BOTH), max_tokens=2)
    extra = {name: body.pop(name) for name in ("chat_template_kwargs", "temperature")}
    with claude.messages.stream(extra_body=extra, **body) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_message()
    uses = [block for block in found.content if block.type == "tool_use"]
    assert [(each.name, each.input) for each in uses] == [("weather", GIVEN), ("stop", {})]
    assert kinds.count("input_json") >= 2


def test_a_block_that_breaks_off(chats: httpx.Client) -> None:
    """An input is an object: what of it had ended, as Anthropic's package reads that of a stream."""
    said = CALL[: CALL.index("Oslo") + 2]
    body = of_claude(messages=begun(said), max_tokens=1)
    told = chats.post("/v1/messages", json=body).json()
    (block,) = told["content"]
    assert (block["type"], block["name"], told["stop_reason"]) == ("tool_use", "weather", "max_tokens")
    assert block["input"] == {}
    said = CALL[: CALL.index("Oslo") + 6]
    whole = chats.post("/v1/messages", json=of_claude(messages=begun(said), max_tokens=1)).json()
    assert whole["content"][0]["input"] == {"city": "Oslo"}


def test_items_of_responses(chats: httpx.Client) -> None:
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    body = {
        **CHAT,
        "input": "Hi",
        "tools": tools,
        "tool_choice": "required",
        "stream": True,
        "max_output_tokens": 200,
    }
    body.pop("messages")
    found = events_of(chats.post("/v1/responses", json=body).text)
    kinds = [each["type"] for each in found]
    parts = [each["delta"] for each in found if each["type"] == "response.function_call_arguments.delta"]
    (done,) = [each for each in found if each["type"] == "response.function_call_arguments.done"]
    assert "".join(parts) == done["arguments"] == found[-1]["response"]["output"][-1]["arguments"]
    added = kinds.index("response.output_item.added")
    assert found[added]["item"]["name"] in ("weather", "stop") and found[added]["item"]["call_id"]
    assert added < kinds.index("response.function_call_arguments.delta")


@pytest.mark.parametrize("streams", [False, True])
def test_an_item_that_breaks_off(chats: httpx.Client, streams: bool) -> None:
    """It says so itself, too: its arguments are no JSON."""
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    said = begun(CALL[: CALL.index("Oslo") + 2])
    body = {**CHAT, "input": said, "tools": tools, "stream": streams, "max_output_tokens": 1}
    body = {key: value for key, value in body.items() if key not in ("messages", "max_tokens")}
    reply = chats.post("/v1/responses", json=body)
    told = events_of(reply.text)[-1]["response"] if streams else reply.json()
    Response.model_validate(told)
    (item,) = told["output"]
    assert (told["status"], item["status"]) == ("incomplete", "incomplete")
    assert item["name"] == "weather" and item["arguments"].startswith('{"city": "Os')


def events_of(text: str) -> list[Any]:
    """Named ones."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]

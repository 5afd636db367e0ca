"""`tool_choice` in the forms of three interfaces."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openai.types.chat import ChatCompletionToolChoiceOptionParam
from openai.types.responses import response_create_params
from pydantic import TypeAdapter

from pykvgraph.openai.errors import WireError
from pykvgraph.server.requests.chat_request import ChatRequest, chat_request_of
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.messages_request import chat_of_messages
from pykvgraph.server.requests.responses_request import chat_of_responses
from pykvgraph.server.requests.tool_choice import tool_choice_of
from pykvgraph.server.settings import Settings

SCHEMA = {"type": "object", "properties": {}}
NAMES = ["a", "b", "c"]
HELLO = [{"role": "user", "content": "Hi"}]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def of_chat(choice: Any) -> ChatRequest:
    TypeAdapter[Any](ChatCompletionToolChoiceOptionParam).validate_python(choice)
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    return chat_request_of(Fields({"messages": HELLO, "tools": tools, "tool_choice": choice}), Settings())


def of_responses(choice: Any) -> ChatRequest:
    TypeAdapter[Any](response_create_params.ToolChoice).validate_python(choice)
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
    body = {"input": "Hi", "tools": tools, "tool_choice": choice}
    return chat_request_of(chat_of_responses(Fields(body)), Settings())


def of_messages(choice: Any) -> ChatRequest:
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    body = {"messages": HELLO, "max_tokens": 9, "tools": tools, "tool_choice": choice}
    return chat_request_of(chat_of_messages(Fields(body)), Settings())


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(function, names))}}


def allowed_flat(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.mark.parametrize(
    ("read", "choice", "wanted"),
    [
        # which tools the prompt tells of, whether one may and must be called, and which one
        (of_chat, "auto", ("abc", True, False, None)),
        (of_chat, "none", ("abc", False, False, None)),
        (of_chat, "required", ("abc", True, True, None)),
        (of_chat, function("b"), ("abc", True, True, "b")),
        (of_chat, allowed("auto", "c", "a"), ("ac", True, False, None)),
        (of_chat, allowed("required", "b"), ("b", True, True, None)),
        (of_responses, "auto", ("abc", True, False, None)),
        (of_responses, "none", ("abc", False, False, None)),
        (of_responses, "required", ("abc", True, True, None)),
        (of_responses, {"type": "function", "name": "b"}, ("abc", True, True, "b")),
        (of_responses, allowed_flat("auto", "c", "a"), ("ac", True, False, None)),
        (of_responses, allowed_flat("required", "b"), ("b", True, True, None)),
        (of_messages, {"type": "auto"}, ("abc", True, False, None)),
        (of_messages, {"type": "none"}, ("abc", False, False, None)),
        (of_messages, {"type": "any"}, ("abc", True, True, None)),
        (of_messages, {"type": "tool", "name": "b"}, ("abc", True, True, "b")),
    ],
)
def test_what_may_be_called(read: Any, choice: Any, wanted: tuple[str, bool, bool, str | None]) -> None:
    chat = read(choice)
    told = "".join(each["function"]["name"] for each in chat.tools)
    assert (told, chat.may_call, chat.must_call, chat.function) == wanted
    assert not chat.one_call


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
def test_one_call_alone(kind: str) -> None:
    choice = {"type": kind, "disable_parallel_tool_use": True, **({"name": "a"} if kind == "tool" else {})}
    assert of_messages(choice).one_call
    fields = Fields({"messages": HELLO, "parallel_tool_calls": False})
    assert chat_request_of(fields, Settings()).one_call


@pytest.mark.parametrize(
    "choice",
    [
        "often",
        5,
        ["auto"],
        {},
        function("d"),
        {"type": "custom", "custom": {"name": "a"}},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": []},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": ["auto"], "tools": [function("a")]}},
        allowed("none", "a"),
        allowed("auto", "a", "d"),
    ],
)
def test_what_no_choice_is(choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in NAMES]
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
    with pytest.raises(WireError, match="tool_choice"):
        chat_request_of(Fields(body), Settings())


def test_many_tools_take_no_long() -> None:
    """The time grows with the tools, not with their square."""
    names = [f"f{i}" for i in range(20_000)]
    tools = list(map(function, names))
    begun = time.process_time()
    chosen = tool_choice_of(allowed("auto", *reversed(names)), tools)
    assert chosen.tools == tools
    assert time.process_time() - begun < 2

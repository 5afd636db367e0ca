"""The body of a chat: messages, tools and the form of the answer, as a prompt and a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykvgraph.checks import shown
from pykvgraph.server.chat_template import ServerTemplate
from pykvgraph.server.errors import invalid, unsupported
from pykvgraph.server.fields import Fields

_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ChatRequest:
    """messages: as a template takes them. prefill: how the answer begins, if the last message was one.

    tools: functions that the model may call; none when it may not. variables: what else the template gets.
    """

    messages: list[dict[str, Any]]
    prefill: str
    tools: list[dict[str, Any]]
    tool_choice: Any
    variables: dict[str, Any]

    def prompt(self, template: ServerTemplate) -> str:
        """The text of the prompt. Raises as the template does."""
        variables = dict(self.variables)
        if self.tools:
            variables["tools"] = self.tools
        return template.prompt(self.messages, self.prefill, **variables)


def chat_request_of(fields: Fields, defaults: Mapping[str, Any]) -> ChatRequest:
    """Reads a body. defaults: variables of the template. Raises WireError."""
    if "messages" not in fields:
        raise invalid("'messages' is required")
    given = fields.get("messages")
    if not isinstance(given, list):
        raise invalid("Expected 'messages' to be an array")
    messages = [_message(each) for each in given]
    choice = fields.get("tool_choice", "auto")
    tools = [_tool(each) for each in fields.array("tools")]
    _check_choice(choice, tools)
    if tools and "grammar" in fields:
        raise invalid("a grammar can't be given together with tools")
    return ChatRequest(
        messages=messages,
        prefill=_take_prefill(messages),
        tools=[] if choice == "none" else tools,
        tool_choice=choice,
        variables=_variables(fields, defaults),
    )


def with_response_format(fields: Fields) -> Fields:
    """The same body, with the schema that response_format stands for. Raises WireError."""
    given = fields.object("response_format")
    if not given:
        return fields
    kind = given.get("type")
    if kind == "text":
        return fields
    if kind == "json_object":
        schema = given.get("schema") or {}
    elif kind == "json_schema":
        inner = given.get("json_schema") or given
        schema = inner.get("schema") if isinstance(inner, dict) else None
        schema = {} if schema is None else schema
    else:
        raise invalid(
            f'response_format: its type must be "text", "json_object" or "json_schema", got {shown(kind)}'
        )
    return fields.replaced(json_schema=schema)


def _variables(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    variables = {**defaults, **fields.object("chat_template_kwargs")}
    effort = fields.get("reasoning_effort")
    if effort == "none":
        variables["enable_thinking"] = False
    elif effort is not None:
        variables["reasoning_effort"] = effort
    # these two are the server's own to give
    return {
        name: value for name, value in variables.items() if name not in ("messages", "add_generation_prompt")
    }


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid(f"a message must be an object, got {shown(given)}")
    if not isinstance(given.get("role"), str):
        raise invalid(f"a message must have a role, got {shown(given)}")
    calls = given.get("tool_calls")
    if "content" not in given and given["role"] != "assistant":
        raise invalid("All non-assistant messages must contain 'content'")
    if not (given.get("content") is not None or calls or given["role"] != "assistant"):
        raise invalid("an assistant message must contain 'content' or 'tool_calls'")
    message = {**given, "content": _content(given.get("content"))}
    if calls is None:
        message.pop("tool_calls", None)
    elif not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise invalid(f"tool_calls must be an array of calls of functions, got {shown(calls)}")
    return message


def _content(given: Any) -> str:
    """Text, or parts of it, which become lines."""
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid("Expected 'content' to be a string or an array")
    texts = []
    for part in given:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(f"a part of a content must have a type, got {shown(part)}")
        if part["type"] != "text":
            raise unsupported(f"{part['type'][:40]}: this server takes text alone")
        if not isinstance(part.get("text"), str):
            raise invalid(f"a part of a content must have a text, got {shown(part)}")
        texts.append(part["text"])
    return "\n".join(texts)


def _is_call(given: Any) -> bool:
    if not isinstance(given, dict):
        return False
    function = given.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tool(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") != "function" or not _is_call(given):
        raise invalid(f"a tool must be a function with a name, got {shown(given)}")
    return given


def _check_choice(choice: Any, tools: list[dict[str, Any]]) -> None:
    if isinstance(choice, dict):
        name = choice["function"]["name"] if _is_call(choice) else None
        if name not in [tool["function"]["name"] for tool in tools]:
            raise invalid(f"tool_choice names {shown(name)}, which is none of the tools")
    elif choice not in _CHOICES:
        raise invalid(f"Invalid tool_choice: {shown(choice)}")


def _take_prefill(messages: list[dict[str, Any]]) -> str:
    """The content of a last message of the assistant, which the answer goes on with."""
    if not messages or messages[-1]["role"] != "assistant":
        return ""
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise invalid("Cannot have 2 or more assistant messages at the end of the list.")
    if messages[-1].get("tool_calls"):
        raise invalid("Cannot continue an assistant message that contains tool calls.")
    return str(messages.pop()["content"])

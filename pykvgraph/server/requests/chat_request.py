"""The body of a chat: messages, tools and the form of the answer, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykvgraph.checks import shown
from pykvgraph.openai.errors import invalid, no_text
from pykvgraph.server.requests.chat_template import ChatPrompt, ServerTemplate
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.tool_choice import tool_choice_of
from pykvgraph.server.settings import REASONING_FORMATS, Settings

_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")


@dataclass(frozen=True)
class ChatRequest:
    """messages: as a template takes them. begun: the assistant's last one, which the answer goes on with.

    tools: functions that the prompt tells of. may_call: whether the model may call them; must_call: whether
    it must, and then `function` if that has a name. one_call: no more than one. schema: JSON that the answer
    follows. reasons: whether thoughts are told apart. variables: what else the template gets. most_thoughts:
    tokens; -1: as many as the model wants. end_of_thoughts: what is said when they are more. opens: whether
    the prompt ends with what opens the assistant's answer.
    """

    messages: list[dict[str, Any]]
    begun: dict[str, Any] | None
    tools: list[dict[str, Any]]
    may_call: bool
    must_call: bool
    function: str | None
    one_call: bool
    schema: dict[str, Any] | None
    reasons: bool
    variables: dict[str, Any]
    most_thoughts: int
    end_of_thoughts: str
    opens: bool = True

    @property
    def thinks(self) -> bool:
        """Whether the model may begin with thoughts."""
        return self.variables["enable_thinking"] is not False

    def prompt(self, template: ServerTemplate) -> ChatPrompt:
        """Raises as the template does."""
        variables = dict(self.variables)
        if self.tools:
            variables["tools"] = self.tools
        opens = self.opens or self.begun is not None
        return template.prompt(self.messages, self.begun, opens, **variables)


def chat_request_of(fields: Fields, settings: Settings) -> ChatRequest:
    """Reads a body. Raises WireError."""
    fields = with_response_format(fields)
    if "messages" not in fields:
        raise invalid("'messages' is required")
    given = fields.get("messages")
    if not isinstance(given, list):
        raise invalid("Expected 'messages' to be an array")
    messages = [_message(each) for each in given]
    choice = fields.get("tool_choice", "auto")
    tools = [_tool(each) for each in fields.array("tools")]
    _check_together(fields, settings, choice, tools)
    chosen = tool_choice_of(choice, tools)
    return ChatRequest(
        messages=messages,
        begun=_take_begun(messages, fields, settings),
        tools=chosen.tools,
        may_call=chosen.may_call,
        must_call=chosen.must_call,
        function=chosen.function,
        one_call=not fields.flag("parallel_tool_calls", True),
        schema=fields.object("json_schema") if "json_schema" in fields else None,
        reasons=settings.parses_replies and _reasoning_format(fields, settings) != "none",
        variables=_variables(fields, settings),
        most_thoughts=_budget(fields, settings),
        end_of_thoughts=fields.text("reasoning_budget_message", settings.reasoning_budget_message),
        opens=fields.flag("add_generation_prompt", True),
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


def _variables(fields: Fields, settings: Settings) -> dict[str, Any]:
    variables = {
        "enable_thinking": True,
        **settings.template_variables,
        **fields.object("chat_template_kwargs"),
    }
    effort = fields.get("reasoning_effort")
    if effort == "none" or _budget(fields, settings) == 0:
        variables["enable_thinking"] = False
    elif effort is not None:
        variables["reasoning_effort"] = effort
    if isinstance(variables["enable_thinking"], str):
        raise invalid('invalid type for "enable_thinking" (expected boolean, got string)')
    # these two are the server's own to give
    return {
        name: value for name, value in variables.items() if name not in ("messages", "add_generation_prompt")
    }


def _budget(fields: Fields, settings: Settings) -> int:
    """Tokens for thoughts; -1: as many as the model wants."""
    name = next((name for name in _BUDGETS if name in fields), _BUDGETS[0])
    budget = fields.integer(name, -1, -1)
    return settings.reasoning_budget if budget < 0 else budget


def _reasoning_format(fields: Fields, settings: Settings) -> str:
    name = fields.text("reasoning_format", settings.reasoning_format)
    if name not in REASONING_FORMATS:
        raise invalid(f"reasoning_format: {shown(name)} is none of {', '.join(REASONING_FORMATS)}")
    return name


def _check_together(fields: Fields, settings: Settings, choice: Any, tools: list[Any]) -> None:
    """What can't stand in one body, or in none any more."""
    if fields.get("functions") or fields.get("function_call") not in (None, "none", "auto"):
        raise invalid("'functions' and 'function_call' are not taken: send 'tools' and 'tool_choice'")
    if not settings.jinja and tools:
        raise invalid("tools param requires --jinja flag")
    if not settings.jinja and choice != "auto":
        raise invalid("tool_choice param requires --jinja flag")
    if "grammar" in fields and tools and choice != "none":
        raise invalid("Cannot use custom grammar constraints with tools.")
    if fields.text("grammar") and "json_schema" in fields:
        raise invalid("Cannot use both json_schema and grammar")
    if "top_logprobs" in fields and not fields.get("logprobs"):
        raise invalid("top_logprobs requires logprobs to be set to true")


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise invalid(f"a message must be an object, got {shown(given)}")
    if not isinstance(given.get("role"), str):
        raise invalid(f"a message must have a role, got {shown(given)}")
    calls = given.get("tool_calls")
    if "content" not in given and given["role"] != "assistant":
        raise invalid("All non-assistant messages must contain 'content'")
    if given["role"] == "assistant" and not calls and not _says(given):
        raise invalid("Assistant message must contain either 'content' or 'tool_calls'!")
    message = {**given, "content": _content(given.get("content"))}
    refusal = message.pop("refusal", None)  # OpenAI's own answers have it, where they have no content
    if isinstance(refusal, str):
        message["content"] = message["content"] or refusal
    if not calls and calls in (None, []):  # clients keep an empty list, and templates take it for calls
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
        kind = part["type"]
        if kind not in ("text", "refusal"):
            raise no_text(kind)
        if not isinstance(part.get(kind), str):
            raise invalid(f"a part of a content must have a text, got {shown(part)}")
        texts.append(part[kind])
    return "\n".join(texts)


def _says(given: dict[str, Any]) -> bool:
    return given.get("content") is not None or isinstance(given.get("refusal"), str)


def _is_call(given: Any) -> bool:
    if not isinstance(given, dict):
        return False
    function = given.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tool(given: Any) -> dict[str, Any]:
    """With the fields that llama-server gives to templates, and no others."""
    if not isinstance(given, dict) or given.get("type") != "function" or not _is_call(given):
        raise invalid(f"a tool must be a function with a name, got {shown(given)}")
    function = Fields(given["function"])
    told = {
        "name": function.text("name"),
        "description": function.text("description"),
        "parameters": function.object("parameters") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": told}


def _take_begun(messages: list[dict[str, Any]], fields: Fields, settings: Settings) -> dict[str, Any] | None:
    """A last message of the assistant, which the answer goes on with."""
    must = fields.flag("continue_final_message")
    if must and fields.flag("add_generation_prompt", True):
        raise invalid(
            "Cannot set both add_generation_prompt and continue_final_message to true; "
            "add_generation_prompt is true unless the body says otherwise"
        )
    is_there = bool(messages) and messages[-1]["role"] == "assistant"
    if must and not is_there:
        raise invalid("continue_final_message: the last message must be one of the assistant")
    if not is_there or not (must or settings.prefills):
        return None
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise invalid("Cannot have 2 or more assistant messages at the end of the list.")
    if messages[-1].get("tool_calls"):
        raise invalid("Cannot continue an assistant message that contains tool calls.")
    return messages.pop()

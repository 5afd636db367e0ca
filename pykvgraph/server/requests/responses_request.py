"""The body of /v1/responses as one of /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

from pykvgraph.checks import shown
from pykvgraph.openai.errors import NO_PICTURE, invalid, no_text
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.truncation import truncation_of

_TEXTS = ("input_text", "output_text", "text")
_UNSAID = {"description": None, "parameters": None, "strict": True}  # of a function, where nobody says it
_UNSAID_OF_SCHEMA = {"description": None, "strict": False}
_PROBS = "message.output_text.logprobs"
_KEPT_ELSEWHERE = {
    "previous_response_id": "send the whole conversation",
    "conversation": "send the whole conversation",
    "prompt": "send its text as 'instructions'",
    "background": "leave it out, and wait for the answer",
}
_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls"),
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
_SAME_FOR_ALL = {
    "previous_response_id": None,
    "store": False,
    "background": False,
    "service_tier": "default",
}
_NO_ARGUMENTS = ("type", "id", "call_id", "status")
# what the service did itself, or keeps: nothing of it is here
_OF_THE_SERVICE = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
        *("item_reference", "compaction"),
    )
)


def chat_of_responses(fields: Fields) -> Fields:
    """Raises WireError for what has no equal."""
    if "input" not in fields:
        raise invalid("'input' is required")
    for name, advice in _KEPT_ELSEWHERE.items():
        if fields.get(name) not in (None, False, ""):
            raise invalid(f"this server does not support {name!r}: {advice}")
    tells_probs = _PROBS in fields.array("include") or fields.integer("top_logprobs", 0) > 0
    chat = {
        "messages": _messages(fields),
        "tools": [_tool(each) for each in fields.array("tools") if _is_function(each)],
        "max_tokens": fields.get("max_output_tokens"),
        "reasoning_effort": fields.object("reasoning").get("effort"),
        "response_format": _format(fields.object("text").get("format")),
        "tool_choice": _choice(fields.get("tool_choice")),
        "logprobs": tells_probs,
        "top_logprobs": fields.get("top_logprobs") if tells_probs else None,
        "n": None,
        "n_cmpl": None,
    }
    return fields.replaced(**chat)


def asked_of_responses(fields: Fields) -> dict[str, Any]:
    """What the answer repeats of a body, as Open Responses requires it. Raises WireError."""
    reasoning = fields.object("reasoning")
    return {
        **{name: fields.get(name) for name in _REPEATED},
        **_SAME_FOR_ALL,
        "truncation": truncation_of(fields),
        "text": _text_asked(fields.object("text")),
        "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
        "top_logprobs": fields.integer("top_logprobs", 0),
        "metadata": fields.object("metadata"),
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": [{**_UNSAID, **tool} if _is_function(tool) else tool for tool in fields.array("tools")],
    }


def _text_asked(given: dict[str, Any]) -> dict[str, Any]:
    form = given.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return {**given, "format": {**_UNSAID_OF_SCHEMA, **form}}
    return {"format": {"type": "text"}, **given}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise invalid("'input' must be a string or array of objects")
    messages = (
        [{"role": "system", "content": fields.text("instructions")}] if "instructions" in fields else []
    )
    for item in items:
        if Fields(item).text("type") in _OF_THE_SERVICE:
            continue
        message = _message(item)
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            _merge(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _message(item: Any) -> dict[str, Any]:
    given = Fields(item)
    kind = given.text("type", "message")
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "content": "", "tool_calls": [_call(given)]}
    if kind.endswith("_call") and "call_id" in given:
        return {"role": "assistant", "content": "", "tool_calls": [_own_call(kind, item)]}
    if kind.endswith("_call_output"):
        return {"role": "tool", "tool_call_id": given.text("call_id"), "content": _result(kind, given)}
    if kind == "reasoning":
        texts = [Fields(part).text("text") for part in given.array("content")]
        return {"role": "assistant", "content": "", "reasoning_content": "".join(texts)}
    if kind != "message" or "role" not in given:
        raise invalid(f"Cannot determine type of 'item': {shown(item)}")
    return {"role": given.text("role"), "content": _text(given.get("content"))}


def _merge(before: dict[str, Any], message: dict[str, Any]) -> None:
    """What the assistant thought, said and called is one message."""
    for key, value in message.items():
        if key != "role" and value:
            before[key] = before[key] + value if before.get(key) else value


def _call(given: Fields) -> dict[str, Any]:
    arguments = given.text("arguments")
    if given.text("type") == "custom_tool_call":  # its argument is a text
        arguments = json.dumps({"input": given.text("input")}, ensure_ascii=False)
    function = {"name": given.text("name"), "arguments": arguments}
    return {"id": given.text("call_id"), "type": "function", "function": function}


def _result(kind: str, given: Fields) -> str:
    """What a tool says: the text of a function; of others what there is, but for pictures."""
    if kind in ("function_call_output", "custom_tool_call_output"):
        return _text(given.get("output"), is_result=True)
    said = given.get("output", given.get("status", ""))
    if isinstance(said, dict) and said.get("type") == "computer_screenshot":
        return NO_PICTURE
    return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def _own_call(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """Of a tool that the client runs, and that has a type of its own: a shell, patches, a computer."""
    arguments = {name: value for name, value in item.items() if name not in _NO_ARGUMENTS}
    function = {"name": kind.removesuffix("_call"), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": Fields(item).text("call_id"), "type": "function", "function": function}


def _text(content: Any, *, is_result: bool = False) -> str:
    """is_result: of a tool, whose pictures are set aside: the conversation could not go on otherwise."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"a content must be a string or an array of parts, got {shown(content)}")
    texts = []
    for part in map(Fields, content):
        kind = part.text("type")
        if kind == "refusal":
            texts.append(part.text("refusal"))
        elif kind in _TEXTS:
            texts.append(part.text("text"))
        elif is_result and kind == "input_image":
            texts.append(NO_PICTURE)
        else:
            raise no_text(kind)
    return "\n".join(texts)


def _is_function(given: Any) -> bool:
    """Others are the service's own, such as a search; a chat has none of these."""
    return Fields(given).text("type") == "function"


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in given.items() if name != "type"}
    return {"type": "function", "function": {"strict": True, **function}}


def _choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        listed = given.get("tools")
        own = filter(_is_function, listed) if isinstance(listed, list) else ()
        tools = [_choice(each) for each in own] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode", "auto"), "tools": tools}}
    if isinstance(given, dict) and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


def _format(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": given}
    return given

"""The body of /v1/messages as one of /v1/chat/completions."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from pykvgraph.checks import shown
from pykvgraph.openai.errors import NO_PICTURE, invalid, no_text
from pykvgraph.server.requests.fields import Fields

_log = logging.getLogger("pykvgraph.server")
_MOST_TOKENS = 4096
_MOST_THOUGHTS = 10000  # tokens, as in llama-server
_SAME = (
    *("seed", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "lora"),
    *("cache_edit", "cache_compressed"),
)
# what the service thought, or did itself, with results that end with _tool_result: nothing of it is here
_OF_THE_SERVICE = ("redacted_thinking", "server_tool_use", "mcp_tool_use")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Claude Code writes a number there that is another one each time, and the prompt would never be in the cache
_STAMP = re.compile(r"(x-anthropic-billing-header:.*?cch=).{5};", re.DOTALL)


def chat_of_messages(fields: Fields) -> Fields:
    """Raises WireError for what has no equal."""
    if "messages" not in fields:
        raise invalid("'messages' is required")
    body: dict[str, Any] = {name: fields.get(name) for name in _SAME}
    body["messages"] = _messages(fields)
    body["tools"] = [_tool(each) for each in fields.array("tools") if _is_own(each)]
    body["max_tokens"] = fields.get("max_tokens", _MOST_TOKENS)
    body["stop"] = fields.get("stop_sequences")
    body["session"] = fields.get("session", fields.object("metadata").get("user_id"))
    choice = fields.object("tool_choice")
    if choice:
        body["tool_choice"] = _choice(choice)
        body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    thinking = fields.object("thinking")
    kind = thinking.get("type")
    if kind is None and choice.get("type") in ("any", "tool"):
        kind = "disabled"  # as Anthropic's own: a call that must be comes without thoughts
    if kind == "enabled":
        body["thinking_budget_tokens"] = thinking.get("budget_tokens", _MOST_THOUGHTS)
    if kind in ("enabled", "disabled"):
        variables = fields.object("chat_template_kwargs")
        body["chat_template_kwargs"] = {"enable_thinking": kind == "enabled", **variables}
    form = Fields(fields.object("output_config")).get("format", fields.get("output_format"))
    if form is not None:
        body["response_format"] = form
    return Fields(body)


def _messages(fields: Fields) -> list[Any]:
    given = fields.get("messages")
    if not isinstance(given, list):
        raise invalid("Expected 'messages' to be an array")
    found = [message for each in given for message in _message(each)]
    if "system" in fields:
        found.insert(0, {"role": "system", "content": _system(fields.get("system"))})
    return found


def _system(given: Any) -> str:
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
    texts = [_text(block) for block in _blocks(blocks, "system")]
    return "".join(_STAMP.sub(r"\1fffff;", text, count=1) for text in texts)


def _message(given: Any) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, in front of what else the message says."""
    if not isinstance(given, dict) or not isinstance(given.get("content"), list):
        return [given]
    results: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks(given["content"], "content"):
        kind = block["type"]
        if kind == "tool_result":
            results.append(_result(block))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "thinking":
            thoughts.append(Fields(block).text("thinking"))
        elif not (kind in _OF_THE_SERVICE or kind.endswith("_tool_result")):
            texts.append({"type": "text", "text": _words(block)})
    if not (texts or calls or thoughts):
        return results
    message = {"role": given.get("role"), "content": texts or ""}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [*results, message]


def _blocks(given: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise invalid(f"{name} must be a string or an array of blocks, got {shown(given)}")
    for block in given:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"a block must have a type, got {shown(block)}")
    return given


def _text(block: dict[str, Any]) -> str:
    if block["type"] != "text":
        raise no_text(block["type"])
    return Fields(block).text("text")


def _words(block: dict[str, Any]) -> str:
    """Of text, of a document that is text, and of what a search has found."""
    of = Fields(block)
    if block["type"] == "search_result":
        return "\n".join([of.text("title"), of.text("source"), *_texts(block.get("content"))])
    if block["type"] == "document":
        source = of.object("source")
        kind = source.get("type")
        if kind not in ("text", "content"):
            raise no_text(f"a document of {shown(kind)}")
        given = source.get("data" if kind == "text" else "content")
        words = [given] if isinstance(given, str) else _texts(given)
        return "\n".join([*filter(None, (of.text("title"), of.text("context"))), *words])
    return _text(block)


def _texts(given: Any) -> list[str]:
    return [_words(block) for block in _blocks(given, "content")]


def _result_words(block: dict[str, Any]) -> str:
    """A picture that a tool has made is set aside: the conversation could not go on otherwise."""
    return NO_PICTURE if block["type"] == "image" else _words(block)


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = block.get("content") or []
    text = content if isinstance(content, str) else "".join(map(_result_words, _blocks(content, "content")))
    return {"role": "tool", "tool_call_id": Fields(block).text("tool_use_id"), "content": text}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    of = Fields(block)
    arguments = json.dumps(of.object("input"), ensure_ascii=False)
    return {
        "id": of.text("id"),
        "type": "function",
        "function": {"name": of.text("name"), "arguments": arguments},
    }


def _is_own(given: Any) -> bool:
    """Whether the client runs the tool. Tools of Anthropic's service, such as its search, are not here."""
    kind = Fields(given).text("type", "custom")
    if kind != "custom":
        _log.info("%s: this server has no tools of its own; the model is not told of it", kind[:40])
    return kind == "custom"


def _tool(given: Any) -> dict[str, Any]:
    tool = Fields(given)
    function = {
        "name": tool.text("name"),
        "description": tool.text("description"),
        "parameters": tool.object("input_schema"),
    }
    return {"type": "function", "function": function}


def _choice(given: dict[str, Any]) -> Any:
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid(f"tool_choice: its type must be auto, any, tool or none, got {shown(kind)}")
    return _CHOICES[kind]

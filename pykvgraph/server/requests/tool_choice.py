"""Which tools a chat may call, and whether it must: OpenAI's `tool_choice`."""

from __future__ import annotations

from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.openai.errors import invalid

_CHOICES = ("auto", "none", "required")
_MODES = ("auto", "required")


class ToolChoice(NamedTuple):
    """tools: those that the prompt tells of. may_call, must_call: whether the answer may, and must, call one.

    function: the name of the one that it must call; None: any.
    """

    tools: list[dict[str, Any]]
    may_call: bool
    must_call: bool
    function: str | None = None


def tool_choice_of(given: Any, tools: list[dict[str, Any]]) -> ToolChoice:
    """tools: all that the request offers. Raises WireError."""
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return _of_allowed(given.get("allowed_tools"), tools)
    if isinstance(given, dict):
        name = _name_of(given)
        _check_names([name], tools)
        return ToolChoice(tools, may_call=True, must_call=True, function=name)
    if given not in _CHOICES:
        raise invalid(
            f"Invalid tool_choice: {shown(given)}; send auto, none, required, a function, or allowed_tools"
        )
    return ToolChoice(tools, bool(tools) and given != "none", given == "required")


def _of_allowed(given: Any, tools: list[dict[str, Any]]) -> ToolChoice:
    """The prompt tells of these alone: a model calls none that it doesn't know of."""
    mode = given.get("mode", "auto") if isinstance(given, dict) else None
    listed = given.get("tools") if isinstance(given, dict) else None
    if mode not in _MODES or not isinstance(listed, list) or not listed:
        raise invalid(f"tool_choice: allowed_tools must have a mode and tools, got {shown(given)}")
    names = [_name_of(each) for each in listed]
    _check_names(names, tools)
    wanted = set(names)
    allowed = [each for each in tools if each["function"]["name"] in wanted]
    return ToolChoice(allowed, may_call=True, must_call=mode == "required")


def _check_names(names: list[Any], tools: list[dict[str, Any]]) -> None:
    """Raises WireError for the first one that no tool has."""
    known = {each["function"]["name"] for each in tools}
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise invalid(f"tool_choice names {shown(name)}, which is none of the tools")


def _name_of(given: Any) -> Any:
    function = given.get("function") if isinstance(given, dict) else None
    return function.get("name") if isinstance(function, dict) else None

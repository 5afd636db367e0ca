"""`context_management` of /v1/messages: what is cleared of a conversation before it becomes a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.openai.errors import invalid
from pykvgraph.server.requests.fields import Fields

_THINKING, _TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
_TRIGGER = {"type": "input_tokens", "value": 100_000}
_KEPT_USES, _KEPT_TURNS = 3, 1
_THOUGHTS = ("thinking", "redacted_thinking")
CLEARED = "[old result]"

Message = dict[str, Any]


class EditedBody(NamedTuple):
    """body: what is left. applied: what the answer tells of it; None: nothing. n_before: input tokens."""

    body: Fields
    applied: list[dict[str, Any]] | None
    n_before: int


def edited(fields: Fields, count: Callable[[Fields], int]) -> EditedBody:
    """A body of /v1/messages with its edits, one behind the other. count: input tokens of a body.

    Raises WireError, and what count() raises.
    """
    if "context_management" not in fields:
        return EditedBody(fields, None, 0)
    edits = Fields(fields.object("context_management")).array("edits")
    kinds = [Fields(edit).text("type") for edit in edits]
    for kind in kinds:
        if kind not in _EDITS:
            raise invalid(
                f"context_management: this server has no edit {shown(kind)}, but {' and '.join(_EDITS)}"
            )
    if _THINKING in kinds[1:] or len(set(kinds)) < len(kinds):
        raise invalid(f"context_management: each edit comes once, and {_THINKING} before the other")
    applied: list[dict[str, Any]] = []
    n_before = n = count(fields)
    for kind, edit in zip(kinds, edits, strict=True):
        messages = fields.array("messages")
        changed = _EDITS[kind](messages, Fields(edit), n)
        if changed is None:
            continue
        left = fields.replaced(messages=changed.messages)
        n_left = count(left)
        if n - n_left < changed.n_least:
            continue
        told = {"type": kind, changed.name: changed.n, "cleared_input_tokens": max(n - n_left, 0)}
        applied.append(told)
        fields, n = left, n_left
    return EditedBody(fields, applied, n_before)


class _Changed(NamedTuple):
    """n: how many things were cleared, told under that name. n_least: input tokens that it must be worth."""

    messages: list[Any]
    name: str
    n: int
    n_least: int = 0


def _without_thoughts(messages: list[Any], edit: Fields, n_tokens: int) -> _Changed | None:
    n_kept = _kept_turns(edit)
    turns = list(_turns(messages))
    n_old = max(len(turns) - n_kept, 0) if n_kept >= 0 else 0
    old = [number for turn in turns[:n_old] for number in turn]
    left, cleared = list(messages), set()
    for number in old:
        blocks = _blocks(messages[number])
        kept = [block for block in blocks if block["type"] not in _THOUGHTS]
        if len(kept) < len(blocks):
            left[number] = {**messages[number], "content": kept}
            cleared.add(next(i for i, turn in enumerate(turns) if number in turn))
    if not cleared:
        return None
    return _Changed(left, "cleared_thinking_turns", len(cleared))


def _without_tool_uses(messages: list[Any], edit: Fields, n_tokens: int) -> _Changed | None:
    trigger: dict[str, Any] = edit.object("trigger") or _TRIGGER
    keep = edit.object("keep")
    uses = {
        str(block.get("id")): str(block.get("name"))
        for message in messages
        for block in _blocks(message)
        if block["type"] == "tool_use"
    }
    n_at, n_kept = {"input_tokens": n_tokens, "tool_uses": len(uses)}, _KEPT_USES
    limit = _value(trigger, "trigger", tuple(n_at))
    if keep:
        n_kept = _value(keep, "keep", ("tool_uses",))
    least = edit.object("clear_at_least")
    n_least = _value(least, "clear_at_least", ("input_tokens",)) if least else 0
    excluded, of_inputs = _names(edit, "exclude_tools"), edit.get("clear_tool_inputs", False)
    inputs = set(uses.values()) if of_inputs is True else set()
    if not isinstance(of_inputs, bool):
        inputs = _names(edit, "clear_tool_inputs")
    if n_at[trigger["type"]] <= limit:
        return None
    old = list(uses)[: max(len(uses) - n_kept, 0)]
    going = {id for id in old if uses[id] not in excluded}
    cleared: set[str] = set()

    def changed(block: dict[str, Any]) -> dict[str, Any]:
        if block["type"] == "tool_result" and block.get("tool_use_id") in going:
            cleared.add(block["tool_use_id"])
            return {**block, "content": CLEARED}
        if block["type"] == "tool_use" and block.get("id") in going and block.get("name") in inputs:
            return {**block, "input": {}}
        return block

    left = [
        {**message, "content": list(map(changed, blocks))} if (blocks := _blocks(message)) else message
        for message in messages
    ]
    return _Changed(left, "cleared_tool_uses", len(cleared), n_least) if cleared else None


_EDITS: dict[str, Callable[[list[Any], Fields, int], _Changed | None]] = {
    _THINKING: _without_thoughts,
    _TOOL_USES: _without_tool_uses,
}


def _turns(messages: list[Any]) -> Iterator[list[int]]:
    """The assistant's messages, by turns: results of tools don't end one."""
    turn: list[int] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        blocks = _blocks(message)
        goes_on = bool(blocks) and all(block["type"] == "tool_result" for block in blocks)
        if role == "assistant":
            turn.append(number)
        elif turn and not goes_on:
            yield turn
            turn = []
    if turn:
        yield turn


def _blocks(message: Any) -> list[dict[str, Any]]:
    """Those of a message; what is none is told of by whoever makes a prompt of it."""
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    are_all = all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in blocks)
    return blocks if are_all else []


def _kept_turns(edit: Fields) -> int:
    """-1: all."""
    keep = edit.get("keep", {"type": "thinking_turns", "value": _KEPT_TURNS})
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return -1
    return _value(keep, "keep", ("thinking_turns",), 1)


def _value(given: Any, name: str, kinds: tuple[str, ...], low: int = 0) -> int:
    """Of {"type": one of the kinds, "value": a number}."""
    if not isinstance(given, dict) or given.get("type") not in kinds or "value" not in given:
        raise invalid(
            f"context_management: {name} must have a type ({' or '.join(kinds)}) and a value, "
            f"got {shown(given)}"
        )
    return Fields(given).integer("value", low, low)


def _names(edit: Fields, name: str) -> set[str]:
    names = edit.array(name)
    if not all(isinstance(each, str) for each in names):
        raise invalid(f"context_management: {name} must be an array of names, got {shown(names)}")
    return set(names)

"""Messages that a template refuses, in the forms that templates take: what is said stays, and its order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from pykvgraph.chat.chat_template import MessagesRefusedError

Messages = list[dict[str, Any]]
_BETWEEN = "\n\n"
_PLAIN = {"role", "content"}
_N_ID = 9


def rendered(messages: Messages, render: Callable[[Messages], str]) -> str:
    """What render() makes of the messages, or of the first form of them that the template takes.

    Raises what it raises for the messages as they are, if it refuses all.
    """
    refusal: MessagesRefusedError | None = None
    for form in _forms(messages):
        try:
            return render(form)
        except MessagesRefusedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _forms(messages: Messages) -> Iterator[Messages]:
    """With the ids of calls as they are, and then as Mistral's templates insist on them."""
    yield from _orders(messages)
    with_ids = _with_short_ids(messages)
    if with_ids != messages:
        yield from _orders(with_ids)


def _orders(messages: Messages) -> Iterator[Messages]:
    """As they are; the system's words in front; one message a turn; the system's words in the first."""
    yield messages
    in_front = _with_system_in_front(messages)
    if in_front != messages:
        yield in_front
    joined = _joined(in_front)
    if joined != in_front:
        yield joined
    if joined and joined[0]["role"] == "system":
        yield _joined([{**joined[0], "role": "user"}, *joined[1:]])


def _with_short_ids(messages: Messages) -> Messages:
    """Conversations that another service began have its ids: the same one becomes the same one everywhere."""
    found = []
    for each in messages:
        own = dict(each)
        if isinstance(each.get("tool_call_id"), str):
            own["tool_call_id"] = _short(each["tool_call_id"])
        if isinstance(each.get("tool_calls"), list):
            own["tool_calls"] = [
                {**call, "id": _short(call["id"])} if isinstance(call.get("id"), str) else call
                for call in each["tool_calls"]
            ]
        found.append(own)
    return found


def _short(id: str) -> str:
    """Nine letters and digits."""
    if len(id) == _N_ID and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode(errors="replace"), digest_size=8).hexdigest()[:_N_ID]


def _with_system_in_front(messages: Messages) -> Messages:
    """Hosted services do so, too: what is to be obeyed is obeyed from the beginning on."""
    words = [each["content"] for each in messages if each["role"] == "system" and each["content"]]
    others = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": _BETWEEN.join(words)}, *others] if words else others


def _joined(messages: Messages) -> Messages:
    """Neighbours of one role, that say nothing but text, are one message."""
    found: Messages = []
    for each in messages:
        before = found[-1] if found else None
        if before and before["role"] == each["role"] and set(before) | set(each) == _PLAIN:
            found[-1] = {**each, "content": _BETWEEN.join(filter(None, (before["content"], each["content"])))}
        else:
            found.append(each)
    return found

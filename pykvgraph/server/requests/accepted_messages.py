"""Messages that a template refuses, in the forms that templates take: what is said stays, and its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pykvgraph.chat.chat_template import MessagesRefusedError

Messages = list[dict[str, Any]]
_BETWEEN = "\n\n"
_PLAIN = {"role", "content"}


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

"""What reads a call out of the text between a call's marks, and how it tells what it has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from pykvgraph.reply.values import Tools, json_text

LONGEST_HEAD = 4096  # characters in front of arguments that are handed on as they come


class Begun(NamedTuple):
    """A call has begun; parts of its arguments follow. id: the model's own; "" when it gave none."""

    name: str
    id: str = ""


Part = Begun | str  # str: of the arguments of the call that began last, as JSON


class CallReader(Protocol):
    """Takes what stands between two marks, as it comes. The parts are the same however the text is cut.

    has_begun: whether a call has: it can't become content any more. rest: behind the end, what is no call.
    """

    has_begun: bool
    rest: str

    def feed(self, text: str) -> list[Part]:
        """What is certain by now."""

    def may_end(self, *, opens: bool) -> bool:
        """Whether a mark that comes now is one, and no part of an argument. opens: one of another call."""

    def end(self, *, closed: bool) -> list[Part]:
        """What was held back: no more text comes. Arguments that broke off stay as they are.

        closed: a mark has said so; else the answer may have been cut, and a name alone be half a name.
        """


class Call(NamedTuple):
    """A whole one."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


# None: this is no call
Read = Callable[[str, Tools], "list[Call] | None"]
Reader = Callable[[Tools], CallReader]


class WholeCalls:
    """Calls that are read when all of them is there.

    read: of the text. is_inside: whether the text breaks off within quotes.
    """

    def __init__(self, read: Read, tools: Tools, is_inside: Callable[[str], bool]) -> None:
        self._read, self._tools, self._is_inside = read, tools, is_inside
        self._text = ""
        self.has_begun = False
        self.rest = ""

    def feed(self, text: str) -> list[Part]:
        """Nothing is certain yet."""
        self._text += text
        return []

    def may_end(self, *, opens: bool) -> bool:
        """Not within quotes, unless it can be read."""
        return bool(told(self._read, self._text, self._tools)) or not self._is_inside(self._text)

    def end(self, *, closed: bool) -> list[Part]:
        """All of it."""
        parts = told(self._read, self._text, self._tools)
        self.has_begun = bool(parts)
        return parts


def told(read: Read, text: str, tools: Tools) -> list[Part]:
    """Whole calls as parts; nothing where there is none, or one has no JSON."""
    parts: list[Part] = []
    try:
        for call in read(text, tools) or ():
            parts += [Begun(call.name, call.id), json_text(call.arguments)]
    except (ValueError, RecursionError, TypeError):
        return []
    return parts

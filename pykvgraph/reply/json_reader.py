"""Calls whose arguments are a JSON object, which is handed on as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.reply.call_reader import LONGEST_HEAD, Begun, Part, Read, told
from pykvgraph.reply.values import Tools

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_NOTHING = re.compile(r"[\s`,;\]]*")


class Head(NamedTuple):
    """Patterns of what stands in front of the arguments, with the groups name and id.

    first: of the first call. later: of one behind another, with the end of that one; None: there is none.
    end: of the last one's end.
    """

    first: re.Pattern[str]
    later: re.Pattern[str] | None
    end: re.Pattern[str]


class JsonCalls:
    """Calls with one of the heads. read: for all others, when they are whole.

    known: the name must be that of a tool. reads_open: whether `read` knows a whole call from half of one.
    """

    def __init__(
        self, heads: Sequence[Head], read: Read, tools: Tools, *, known: bool = False, reads_open: bool = True
    ) -> None:
        self._heads, self._read, self._tools = heads, read, tools
        self._known, self._reads_open = known, reads_open
        self._text = ""  # not yet decided
        self._object: _JsonObject | None = None
        self._is_hopeless = False
        self.has_begun = False
        self.rest = ""

    def feed(self, text: str) -> list[Part]:
        """Names, and parts of arguments."""
        self._text += text
        parts: list[Part] = []
        while self._object is not None or self._open(parts):
            assert self._object is not None  # _open() made it
            passed, self._text = self._object.feed(self._text)
            if passed:
                parts.append(passed)
            if not self._object.is_whole:
                break
            self._object = None
        return parts

    def may_end(self, *, opens: bool) -> bool:
        """Not within a text of the arguments."""
        if self.has_begun:
            return self._object is None or not self._object.is_in_text
        return opens or bool(told(self._read, self._text, self._tools))

    def end(self, *, closed: bool) -> list[Part]:
        """Calls without a head that is known here, and what stands behind the last one."""
        if not (self.has_begun or closed or self._reads_open):
            return []
        if not self.has_begun:
            parts = told(self._read, self._text, self._tools)
            self.has_begun = bool(parts)
            return parts
        if self._object is not None:  # it has broken off
            return []
        end = self._heads[0].end.match(self._text)
        left = self._text[end.end() :] if end else self._text
        if _NOTHING.fullmatch(left):
            return []
        parts = told(self._read, left, self._tools)
        self.rest = "" if parts else left
        return parts

    def _open(self, parts: list[Part]) -> bool:
        """Whether a call begins."""
        if self._is_hopeless:
            return False
        for head in self._heads:
            pattern = head.later if self.has_begun else head.first
            match = pattern.match(self._text[:LONGEST_HEAD]) if pattern else None
            if match is None or (self._known and match["name"] not in self._tools):
                continue
            parts.append(Begun(match["name"].strip(), match.groupdict().get("id") or ""))
            self._text = self._text[match.end() :]
            self._object = _JsonObject()
            self._heads = (head,)
            self.has_begun = True
            return True
        self._is_hopeless = len(self._text) >= LONGEST_HEAD
        return False


class _JsonObject:
    """A JSON object, up to its end. Control characters in its texts become escapes."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = False
        self.is_in_text = False
        self.is_whole = False

    def feed(self, text: str) -> tuple[str, str]:
        """What belongs to it, and what stands behind it."""
        parts = []
        at = 0
        while at < len(text) and not self.is_whole:
            if self._is_escaped:
                parts.append(text[at])
                self._is_escaped = False
                at += 1
                continue
            match = (_INSIDE if self.is_in_text else _OUTSIDE).search(text, at)
            if match is None:
                parts.append(text[at:])
                at = len(text)
            else:
                parts += [text[at : match.start()], self._passed(match[0])]
                at = match.end()
        return "".join(parts), text[at:]

    def _passed(self, char: str) -> str:
        if char == '"':
            self.is_in_text = not self.is_in_text
        elif not self.is_in_text:
            self._depth += 1 if char in "{[" else -1
            self.is_whole = self._depth == 0
        elif char == "\\":
            self._is_escaped = True
        else:
            return json.dumps(char)[1:-1]
        return char

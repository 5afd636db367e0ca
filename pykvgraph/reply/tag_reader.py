"""Calls whose arguments stand between marks, one by one; texts are handed on as they come."""

from __future__ import annotations

import re
from typing import NamedTuple

from pykvgraph.reply.call_reader import LONGEST_HEAD, Begun, Part
from pykvgraph.reply.nested_values import nested_value
from pykvgraph.reply.raw_texts import is_text
from pykvgraph.reply.values import Tools, json_text, property_of, typed
from pykvgraph.sequence.detokenizer import overlap

_COVER = ("<![CDATA[", "]]>")


class Tags(NamedTuple):
    """head: pattern of what stands in front of the arguments, with the group name.

    opens: what an argument begins with. rest: pattern of what follows up to its value, with the groups key
    and perhaps string, which says whether the value is a text. close: behind a value; %k is its key.
    trims: whether a line break beside a mark belongs to the mark. covers: whether a text may be in CDATA.
    nests: what marks within a value begin with, where lists and objects have some; "": they are JSON.
    """

    head: str
    opens: str
    rest: str
    close: str
    trims: bool = False
    covers: bool = False
    nests: str = ""


class TaggedCall:
    """One call. A value is text where the tool's schema, or the group `string`, says so; else as it looks.

    A mark that closes a value is one only where another argument or the end follows: texts may have it, too.
    """

    def __init__(self, tags: Tags, tools: Tools) -> None:
        self._tags, self._tools = tags, tools
        argument = rf"\s*{re.escape(tags.opens)}{tags.rest}"
        self._first = re.compile(rf"\s*{tags.head}{argument}")
        self._later = re.compile(argument)
        self._bare = re.compile(rf"\s*{tags.head}\s*")
        self._text = ""  # not yet decided
        self._is_hopeless = False  # whether what stands there can't become an argument any more
        self._name = ""
        self._value: _Value | None = None
        self.has_begun = False
        self.rest = ""

    def feed(self, text: str) -> list[Part]:
        """The name, and parts of arguments."""
        self._text += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def may_end(self, *, opens: bool) -> bool:
        """Not within a value."""
        if not self.has_begun:
            return opens or self._bare.fullmatch(self._text) is not None
        if self._value is None:
            return not self._text.strip()
        at, follows = self._closed(self._value)
        return at >= 0 and not follows

    def end(self, *, closed: bool) -> list[Part]:
        """A value that broke off stays as it is."""
        parts: list[Part] = []
        if not self.has_begun:
            bare = self._bare.fullmatch(self._text) if closed else None
            if bare is not None:
                self.has_begun = True
                parts += [Begun(bare["name"].strip()), "{}"]
            return parts
        while self._step(parts, at_end=True):
            pass
        if self._value is not None:
            parts.append(self._value.broken_off(self._text))
        else:
            parts.append("}" if closed else "")
            self.rest = self._text.strip()
        return parts

    def _step(self, parts: list[Part], at_end: bool = False) -> bool:
        """Whether there may be another step."""
        if self._value is None:
            return self._open(parts)
        value = self._value
        if value.skips_break and self._text:
            self._text = self._text.removeprefix("\n")
            value.skips_break = False
        at, follows = self._closed(value)
        n_certain = len(self._tags.opens) + bool(self._tags.nests)  # a mark within a value may close, too
        if at < 0 or not (at_end or len(follows) >= n_certain):
            self._pass_on(value, at, parts)
            return False
        said = self._text[:at]
        said = said.removesuffix("\n") if self._tags.trims else said
        parts.append(value.closed(said))
        self._text = self._text[at + len(value.close) :]
        self._value = None
        return True

    def _open(self, parts: list[Part]) -> bool:
        if self._is_hopeless:
            return False
        match = (self._later if self.has_begun else self._first).match(self._text[:LONGEST_HEAD])
        if match is None:
            self._is_hopeless = len(self._text) >= LONGEST_HEAD
            return False
        front = ", "
        if not self.has_begun:
            self._name, self.has_begun, front = match["name"].strip(), True, "{"
            parts.append(Begun(self._name))
        self._text = self._text[match.end() :]
        key = match["key"].strip()
        self._value = _Value(self._tags, self._tools, self._name, key, match.groupdict().get("string"))
        parts.append(f"{front}{json_text(key)}: {self._value.opening}")
        return True

    def _closed(self, value: _Value) -> tuple[int, str]:
        """Where the value's end may be, or -1; and what follows, without space."""
        close, opens = value.close, self._tags.opens
        at = self._text.find(close, value.n_seen)
        while at >= 0:
            follows = self._text[at + len(close) :].lstrip()
            is_closed_too = self._tags.nests and follows.startswith(f"{opens}/")
            if follows[: len(opens)] == opens[: len(follows)] and not is_closed_too:
                return at, follows
            value.n_seen = at + len(close)
            at = self._text.find(close, value.n_seen)
        value.n_seen = max(value.n_seen, len(self._text) - len(close) + 1)
        return -1, ""

    def _pass_on(self, value: _Value, at: int, parts: list[Part]) -> None:
        """Of a text, what is certainly no part of a mark. at: where its end may be."""
        if not value.streams:
            return
        n = at if at >= 0 else len(self._text) - overlap(self._text, value.close)
        if self._tags.trims and self._text[:n].endswith("\n"):
            n -= 1
        if n:
            parts.append(value.passed(self._text[:n]))
            self._text = self._text[n:]
            value.n_seen = max(value.n_seen - n, 0)


class _Value:
    """One argument's, while it is said. opening, close: what its JSON begins with, and the mark behind it."""

    def __init__(self, tags: Tags, tools: Tools, name: str, key: str, string: str | None) -> None:
        self._tags, self._tool = tags, tools.get(name) or {}
        self._schema = property_of(self._tool, key)
        self.is_text = string in ("true", "string") or is_text(self._schema, self._tool)
        self.streams = self.is_text and not tags.covers
        self.close = tags.close.replace("%k", key)
        self.skips_break = tags.trims
        self.opening = '"' if self.is_text else ""
        self.n_seen = 0  # characters with marks that close nothing

    def passed(self, text: str) -> str:
        """A part of the text, as JSON."""
        return json_text(text)[1:-1]

    def broken_off(self, text: str) -> str:
        """The same of a value that has no end."""
        text = text.removeprefix(_COVER[0]) if self._tags.covers else text
        return self.passed(text) if self.is_text else text

    def closed(self, text: str) -> str:
        """The end of the value, as JSON."""
        if self._tags.covers and text.startswith(_COVER[0]) and text.endswith(_COVER[1]):
            text = text[len(_COVER[0]) : -len(_COVER[1])]
        if self.is_text:
            return f'{self.passed(text)}"'
        if self._tags.nests:
            return json_text(nested_value(text, self._tags.nests, self._schema, self._tool))
        return json_text(typed(text, self._schema, self._tool))

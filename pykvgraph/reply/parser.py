"""The parser of replies: text in as it comes; content, reasoning and calls out."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pykvgraph.reply.call_reader import Begun, CallReader, Part
from pykvgraph.reply.delta import CallPart, Content, Delta, Reasoning, ToolCall
from pykvgraph.reply.format import Format, State
from pykvgraph.reply.values import Tools
from pykvgraph.sequence.detokenizer import overlap

_MOST_CLOSES = 16  # marks behind what may become a call
_LETTERS = string.ascii_letters + string.digits


def new_id() -> str:
    """The id of a call: nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class ReplyParser:
    """Takes a reply apart. The result is the same however its text is cut.

    format: of the model. tools: as OpenAI's interface has them; without, nothing is a call. prompt: what the
    reply goes on from, which may have opened the reasoning. reasoning: False: it is left in the content.

    A call is handed out as soon as its name and the beginning of its arguments are there, and then its
    arguments as they come; no two ids are the same. Nothing is lost: what looks like a call, but never comes
    so far, is content, and arguments that break off stay as they are. White space beside a mark belongs to
    the mark.
    """

    def __init__(
        self,
        format: Format,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: str = "",
        *,
        reasoning: bool = True,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        format = format if reasoning else format.without_thinking()
        self._format = format if tools else format.without_calls()
        self._tools = tools_of(tools)
        self._new_id = new_id
        self._marks = self._format.marks()
        self._patterns = {state: _pattern(tuple(marks)) for state, marks in self._marks.items()}
        self._state = State.START
        self._text = ""  # not yet decided
        self._space = ""  # at the end of what was handed out; it is part of the text if more text follows
        self._after_mark = False
        self._raw = ""  # of a header, or of what isn't yet a call: its text with the mark that opened it
        self._reader: CallReader | None = None  # of the call
        self._id = ""  # of the call that began last
        self._ids: set[str] = set()
        self._n_closes = 0
        self._out: list[Delta] = []
        self._begin(prompt)

    def feed(self, text: str) -> list[Delta]:
        """What is certain by now."""
        self._text += text
        while self._advance():
            pass
        return self._take()

    def end(self) -> list[Delta]:
        """The rest: no more text comes."""
        while self._advance(at_end=True):
            pass
        if self._state in (State.CALL, State.HEADER):
            self._finish_call(closed=False)
        else:
            self._say(self._text)
        self._text = ""
        if not self._after_mark:
            self._emit(self._space)
        self._space = ""
        return self._take()

    def _begin(self, prompt: str) -> None:
        thinking, headers = self._format.thinking, self._format.headers
        if thinking is not None and thinking.is_open(prompt):
            self._state, self._after_mark = State.REASONING, True
        elif headers is not None and not headers.first:
            self._state, self._after_mark = State.HEADER, True

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _advance(self, at_end: bool = False) -> bool:
        """One step; whether there may be another one."""
        if self._state is State.START:
            return self._decide(at_end)
        pattern, text = self._patterns[self._state], self._text
        match = pattern.search(text) if pattern else None
        if match is not None:
            self._add(text[: match.start()])
            self._text = text[match.end() :]
            self._pass(match[0])
            return True
        certain = len(text) if at_end else len(text) - self._held(text)
        self._add(text[:certain])
        self._text = text[certain:]
        return False

    def _held(self, text: str) -> int:
        """How much of the end may become a mark."""
        return max((overlap(text, mark) for mark in self._marks[self._state]), default=0)

    def _decide(self, at_end: bool) -> bool:
        """At the start: whether a call begins right here."""
        body = self._text.lstrip()
        if not body:
            self._say(self._text)
            self._text = ""
            return False
        for mark, state in self._marks[State.START].items():
            if body.startswith(mark):
                self._space += self._text[: len(self._text) - len(body)]
                self._text = body[len(mark) :]
                self._open(state, mark)
                if self._reader is not None:
                    self._hand_on(self._reader.feed(mark))
                return True
            if mark.startswith(body) and not at_end:
                return False
        self._state = State.CONTENT
        return True

    def _add(self, text: str) -> None:
        """Text of the present state, without marks."""
        if self._state not in (State.CALL, State.HEADER):
            self._say(text)
            return
        if self._reader is None or not self._reader.has_begun:
            self._raw += text
        if self._reader is not None:
            self._hand_on(self._reader.feed(text))

    def _pass(self, mark: str) -> None:
        """A mark came."""
        state, following = self._state, self._marks[self._state][mark]
        if state is State.HEADER:
            self._end_header(mark)
        elif state is State.CALL and self._goes_on(following, mark):
            self._add(mark)
        elif state is State.CALL:
            if following is State.START:
                self._raw += mark
            self._finish_call(closed=True)
            self._go_on(following, mark)
        else:
            self._go_on(following, mark)

    def _go_on(self, state: State, mark: str) -> None:
        if state in (State.CALL, State.HEADER):
            self._open(state, mark)
        else:
            self._state, self._space, self._after_mark = state, "", True

    def _open(self, state: State, mark: str) -> None:
        self._state = state
        self._raw, self._space = self._space + mark, ""
        self._n_closes = 0
        self._reader = self._new_reader() if state is State.CALL else None

    def _new_reader(self) -> CallReader | None:
        return None if self._format.calls is None else self._format.calls.read(self._tools)

    def _end_header(self, mark: str) -> None:
        headers = self._format.headers
        assert headers is not None
        self._raw += mark
        state = headers.state_after(self._raw)
        if state is State.CALL:
            self._state, self._reader = state, self._new_reader()
            if self._reader is not None:
                self._hand_on(self._reader.feed(self._raw))
        else:
            self._go_on(state, mark)

    def _goes_on(self, following: State, mark: str) -> bool:
        """Whether the mark may belong to a text within the call."""
        reader = self._reader
        self._n_closes += 1
        if reader is None or (self._n_closes > _MOST_CLOSES and not reader.has_begun):
            return False
        return not reader.may_end(opens=following is State.CALL)

    def _finish_call(self, *, closed: bool) -> None:
        """What was collected is a call; or else content."""
        reader, self._reader = self._reader, None
        parts = [] if reader is None else reader.end(closed=closed)
        raw, self._raw = self._raw, ""
        self._state = State.CONTENT
        if reader is None or not reader.has_begun:
            self._say(raw)
            return
        self._hand_on(parts)
        self._after_mark = True
        self._say(reader.rest)

    def _hand_on(self, parts: list[Part]) -> None:
        """A call's name and arguments; neighbouring parts as one."""
        text = ""
        for part in parts:
            if isinstance(part, Begun):
                self._emit_arguments(text)
                text = ""
                self._id = part.id if part.id and part.id not in self._ids else self._new_id()
                self._ids.add(self._id)
                self._raw = ""
                self._out.append(ToolCall(self._id, part.name))
            else:
                text += part
        self._emit_arguments(text)

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._out.append(CallPart(self._id, text))

    def _say(self, text: str) -> None:
        if not text.strip():
            self._space += "" if self._after_mark else text
            return
        text = self._space + text
        if self._after_mark:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._after_mark = False
        self._emit(kept)

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(Reasoning(text) if self._state is State.REASONING else Content(text))


def tools_of(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """The schema of each tool, by its name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {each["name"]: each.get("parameters") or {} for each in functions if "name" in each}


def _pattern(marks: tuple[str, ...]) -> re.Pattern[str] | None:
    """Of equals that begin at the same place the longest."""
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if marks else None

# ruff: noqa: RUF001  # marks of models have fullwidth bars
"""How a model marks its reasoning and its calls: what a row of the tables says."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pykvgraph.reply.call_reader import Reader

_CONTROL = ("<|", "<｜")  # what names of control tokens begin with


class State(enum.Enum):
    """Where the text is that comes next."""

    START = "start"  # nothing but white space since the beginning, or since a mark
    CONTENT = "content"
    REASONING = "reasoning"
    HEADER = "header"  # a line that says where the text behind it belongs
    CALL = "call"


@dataclass(frozen=True)
class Thinking:
    """Marks around reasoning. signs: texts of a template that has them; (): the closing mark is enough."""

    open: str
    close: str
    signs: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Whether what follows the prompt is reasoning."""
        return prompt.rstrip().endswith(self.open.rstrip())

    def parted(self, text: str) -> tuple[str, str]:
        """The reasoning that a text begins with between the marks, and what is behind it."""
        front, opened, rest = text.partition(self.open.strip())
        thought, closed, content = rest.partition(self.close.strip())
        return (thought, content) if opened and closed and not front.strip() else ("", text)


@dataclass(frozen=True)
class Headers:
    """Headers in front of each part of a reply. All between one of `opens` and `message` is the header.

    first: what opens one where a reply begins; "": a prompt ends within a header. ends: marks behind a part.
    content, calls, reasoning: texts in a header that say what follows, in this order; else it is content.
    """

    opens: tuple[str, ...]
    message: str
    ends: tuple[str, ...]
    first: str = ""
    content: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()

    def state_after(self, header: str) -> State:
        """What follows a header."""
        for state, signs in (
            (State.CONTENT, self.content),
            (State.CALL, self.calls),
            (State.REASONING, self.reasoning),
        ):
            if any(sign in header for sign in signs):
                return state
        return State.CONTENT


@dataclass(frozen=True)
class Calls:
    """Marks around a call, and how to read what stands between them.

    signs: texts of a template that has this format. opens, close: around a call; "": nothing closes it but
    the next mark or the end. first: marks that open a call only where a reply begins, and are a part of it.
    silent: marks that say nothing. around: marks around content that say nothing, with or without tools.
    """

    name: str
    signs: tuple[str, ...]
    opens: tuple[str, ...]
    close: str
    read: Reader
    first: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    headers: Headers | None = None


@dataclass(frozen=True)
class Format:
    """How one model writes a reply. None: it has no such thing."""

    thinking: Thinking | None = None
    calls: Calls | None = None
    headers: Headers | None = None

    @property
    def name(self) -> str:
        """Of the way that calls are written; "" without."""
        return "" if self.calls is None else self.calls.name

    def without_calls(self) -> Format:
        """The same, of a model that has no tools."""
        calls = None if self.calls is None else replace(self.calls, opens=(), close="", first=(), silent=())
        headers = None if self.headers is None else replace(self.headers, calls=())
        return replace(self, calls=calls, headers=headers)

    def without_thinking(self) -> Format:
        """The same, but reasoning is content."""
        headers = None if self.headers is None else replace(self.headers, reasoning=())
        return replace(self, thinking=None, headers=headers)

    def marks(self) -> Mapping[State, Mapping[str, State]]:
        """In each state the marks that end it, with the state that follows."""
        found: dict[State, dict[str, State]] = {state: {} for state in State}
        calls, headers, thinking = self.calls, self.headers, self.thinking
        if calls is not None:
            opens = dict.fromkeys(calls.opens, State.CALL)
            found[State.START] |= dict.fromkeys(calls.first, State.CALL)
            found[State.CONTENT] |= opens | dict.fromkeys((*calls.silent, *calls.around), State.START)
            found[State.CALL] |= opens | ({calls.close: State.START} if calls.close else {})
        if thinking is not None:
            found[State.CONTENT][thinking.open] = State.REASONING
            found[State.REASONING][thinking.close] = State.START
        if thinking is not None and calls is not None:  # models call without an end of their thoughts
            ends = dict.fromkeys(calls.opens, State.CALL) | dict.fromkeys(calls.silent, State.START)
            # a thought may speak of other marks, but not say a control token
            found[State.REASONING] |= {mark: ends[mark] for mark in ends if mark.startswith(_CONTROL)}
        if headers is not None:
            found[State.HEADER][headers.message] = State.CONTENT  # or another one, as the header says
            if headers.first:
                found[State.START][headers.first] = State.HEADER
            for state in (State.CONTENT, State.REASONING, State.CALL):
                found[state] |= dict.fromkeys(headers.opens, State.HEADER)
                found[state] |= dict.fromkeys(headers.ends, State.START)
        return found

    def texts(self) -> tuple[str, ...]:
        """Every mark. Those that are control tokens must be in the text that is parsed."""
        found = {mark for marks in self.marks().values() for mark in marks}
        return tuple(sorted(found - set(self.calls.first if self.calls else ())))

"""What a reply is made of, as it comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model thought with."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call. arguments: a JSON object, as text, as far as it is known. In a stream they come behind it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class CallPart:
    """More of a call's arguments. id: the call's."""

    id: str
    text: str


Delta = Content | Reasoning | ToolCall | CallPart


@dataclass(frozen=True)
class Reply:
    """A whole reply."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Reply:
        """Puts deltas together."""
        deltas = list(deltas)
        arguments: defaultdict[str, list[str]] = defaultdict(list)
        for each in deltas:
            if isinstance(each, CallPart):
                arguments[each.id].append(each.text)
        return cls(
            "".join(each.text for each in deltas if isinstance(each, Content)),
            "".join(each.text for each in deltas if isinstance(each, Reasoning)),
            tuple(
                replace(each, arguments=each.arguments + "".join(arguments[each.id]))
                for each in deltas
                if isinstance(each, ToolCall)
            ),
        )

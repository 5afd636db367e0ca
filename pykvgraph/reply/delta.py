"""What a reply is made of, as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
    """A whole call. arguments: a JSON object, as text."""

    id: str
    name: str
    arguments: str


Delta = Content | Reasoning | ToolCall


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
        return cls(
            "".join(each.text for each in deltas if isinstance(each, Content)),
            "".join(each.text for each in deltas if isinstance(each, Reasoning)),
            tuple(each for each in deltas if isinstance(each, ToolCall)),
        )

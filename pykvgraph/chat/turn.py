"""A turn of a conversation as tokens, and the report of turns that were given up."""

from __future__ import annotations

from dataclasses import dataclass, field

from pykvgraph.types import UpdateStats


@dataclass
class Turn:
    """A message and its answer.

    user: the message. prompt: the tokens from the turn's beginning up to the answer. n_header: how many of
    them come before the message. said: the tokens of the answer so far.
    """

    user: str
    prompt: list[int]
    n_header: int
    said: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Discard:
    """What a conversation gave up because the cache was full.

    n_turns: whole turns; 0: a part of the only one that is left. n_tokens: all of their tokens. stats: what
    the context shift did; None where there was none, as the tokens were not in the cache yet, or the model
    refuses it: what is left is decoded again then. reason: why it refuses, else "".
    """

    n_turns: int
    n_tokens: int
    stats: UpdateStats | None
    reason: str = ""

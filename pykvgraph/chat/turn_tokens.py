"""Turns as tokens: what people wrote can't become control tokens, and nothing is tokenized twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from pykvgraph.chat.turn_format import USER, TurnFormat
from pykvgraph.context.common_length import common_length
from pykvgraph.model.tokenizer import Tokenizer
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


class TurnTokens:
    """The tokens of a format's texts. front, closing: as in TurnFormat."""

    def __init__(self, format: TurnFormat, tokenizer: Tokenizer) -> None:
        self.format = format
        self._tokenizer = tokenizer
        self.front = self._front()
        self.closing = self._encode(format.closing)

    def turn(self, message: str, *, is_first: bool) -> Turn:
        """A turn without its answer. Raises what Tokenizer.encode raises."""
        before, _, after = (self.format.first if is_first else self.format.later).partition(USER)
        # where the whole text begins, SentencePiece's space does too
        begins = is_first and not self.format.front
        header = self._encode(before, begins)
        if self._spells_control_tokens(message):
            ids = [*header, *self._encode(message, begins and not before, False), *self._encode(after)]
        else:  # in one piece, as what a model learned from was
            ids = self._encode(before + message + after, begins)
        return Turn(message, ids, common_length(ids, header))

    def text_of(self, ids: list[int]) -> str:
        """The text of an answer's tokens."""
        return b"".join(map(self._piece, ids)).decode("utf-8", "replace")

    def cut(self, ids: list[int], text: str) -> list[int]:
        """The tokens of `text`, which those of `ids` begin with: as many of these as fit, and new ones."""
        rest, n = text.encode(), 0
        while n < len(ids) and rest.startswith(piece := self._piece(ids[n])):
            rest = rest[len(piece) :]
            n += 1
        return ids[:n] + self._encode(rest.decode("utf-8", "replace"), parse_special=False)

    def _piece(self, token: int) -> bytes:
        # a model may have more rows than its tokenizer has tokens
        return self._tokenizer.token_to_piece(token) if token < self._tokenizer.n_vocab else b""

    def _front(self) -> list[int]:
        ids = self._encode(self.format.front, begins=True)
        bos = self._tokenizer.bos
        wants_bos = bos is not None and self._tokenizer.encode("")[:1] == [bos]
        return [bos, *ids] if wants_bos and bos is not None and ids[:1] != [bos] else ids

    def _encode(self, text: str, begins: bool = False, parse_special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, False, parse_special, add_space_prefix=begins)

    def _spells_control_tokens(self, text: str) -> bool:
        return self._encode(text, parse_special=True) != self._encode(text, parse_special=False)

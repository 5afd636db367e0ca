"""Tokens that were said, and which of them the parts of an answer are made of."""

from __future__ import annotations

from pykvgraph.reply.delta import Content, Delta, ToolCall
from pykvgraph.types import Piece


class UntoldPieces:
    """Of one sample. Thoughts, calls and the marks around them have tokens, too; these aren't handed out."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """It was said. A token that stops the text isn't part of it."""
        if piece.finish_reason != "stop":
            self._pieces.append(piece)

    def of(self, deltas: list[Delta]) -> list[list[Piece]]:
        """Of each of these deltas the pieces that its text came with; none of one that is no content.

        deltas: all that the pieces so far gave. Without any, pieces wait: their text may be a mark.
        """
        if not deltas:
            return []
        pieces, self._pieces = self._pieces, []
        said = "".join([piece.text for piece in pieces])
        found, at = [], 0
        for delta in deltas:
            text = "" if isinstance(delta, ToolCall) else delta.text
            # behind the last delta nothing is left, and before it there may be a mark that has these letters
            begin = said.rfind(text) if delta is deltas[-1] else said.find(text, at)
            at = max(begin, 0) + len(text)
            found.append(_between(pieces, begin, at) if isinstance(delta, Content) else [])
        return found


def _between(pieces: list[Piece], begin: int, end: int) -> list[Piece]:
    """Those with text there. begin: -1: the text isn't these pieces' alone, and they all belong to it."""
    if begin < 0:
        return pieces
    found, at = [], 0
    for piece in pieces:
        # one without text has bytes of a character that a later one completes
        if begin <= at < end or at < begin < at + len(piece.text):
            found.append(piece)
        at += len(piece.text)
    return found

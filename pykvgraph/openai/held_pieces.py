"""Tokens of streams that are told later, as their text is not certain yet."""

from __future__ import annotations

import dataclasses

from pykvgraph.openai.sample import Sample
from pykvgraph.types import Piece


class HeldPieces:
    """Of any number of samples: each piece is taken once, in its order."""

    def __init__(self) -> None:
        self._held: dict[int, list[Piece]] = {}  # by the sample's index

    def add(self, sample: Sample, piece: Piece) -> None:
        """It was said. A token that stops the text isn't part of it; take_last() has it."""
        if piece.finish_reason != "stop":
            self._held.setdefault(sample.index, []).append(piece)

    def take(self, sample: Sample) -> list[Piece]:
        """All that came since the last call."""
        return self._held.pop(sample.index, [])

    def take_last(self, sample: Sample) -> list[Piece]:
        """All that is left behind the text, and the token that ended it."""
        return [*self.take(sample), *(dataclasses.replace(piece, text="") for piece in sample.end)]

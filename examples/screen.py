"""What failover.py and pipeline.py print: a text while it is written, and what is told about it."""

from __future__ import annotations

import sys

import pykvgraph as kvg
from pykvgraph.sequence.detokenizer import Detokenizer


class Screen:
    """Prints what is new in a text; what is told about it goes to stderr."""

    def __init__(self, tokenizer: kvg.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = Detokenizer()  # a letter may span tokens
        self._n_shown = 0

    def show(self, text: list[int]) -> None:
        data = b"".join(map(self._tokenizer.token_to_piece, text[self._n_shown :]))
        if self._tokenizer.space_prefix and not self._n_shown:
            data = data.removeprefix(b" ")  # which encode() puts before a text
        self._n_shown = len(text)
        print(self._stream.feed(data), end="", flush=True)

    def end(self) -> None:
        print(self._stream.finish())

    def tell(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)

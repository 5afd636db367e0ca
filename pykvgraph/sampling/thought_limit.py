"""A limit on a model's thoughts: counts their tokens, and says what comes next when they are too many."""

from __future__ import annotations

import codecs
from collections import deque

from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import ThoughtLimit


class Thoughts:
    """Of one text, which tells each of its tokens.

    As llama.cpp's reasoning budget counts: from the opening mark on, anew for each; a character is not cut
    in the middle, so that there may be up to three tokens more.
    """

    def __init__(self, limit: ThoughtLimit, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._n_tokens = limit.n_tokens
        self._open, self._close = limit.open.encode(), limit.close.encode()
        message = tokenizer.encode(limit.message, False, True) if limit.message else []
        self._closing = [*message, *tokenizer.encode(limit.close, False, True)]
        self._end = b""  # of the text so far, where a mark may be
        self._due: deque[int] = deque()
        self._left: int | None = None  # tokens; None: the model isn't thinking
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if limit.n_begun is not None:
            self._begin(limit.n_tokens - limit.n_begun)

    @property
    def due(self) -> int | None:
        """The token that must be said now; None: any may be."""
        return self._due[0] if self._due else None

    def give_up(self) -> None:
        """What is due may not be said: the thoughts end where the model ends them."""
        self._due.clear()

    def accept(self, token: int) -> None:
        """The text has gone on by a token."""
        if self._due:
            self._due.popleft()
            return
        # a model may have more rows than there are tokens
        piece = (
            self._tokenizer.token_to_piece(token, special=True) if token < self._tokenizer.n_vocab else b""
        )
        self._end = (self._end + piece)[-max(len(self._open), len(self._close)) :]
        if self._left is None:
            if self._end.endswith(self._open):
                self._begin(self._n_tokens)
        elif self._end.endswith(self._close):
            self._left = None
        else:
            self._left -= 1
            self._decoder.decode(piece)
            if self._left <= 0 and not self._decoder.getstate()[0]:  # no character is in the middle
                self._finish()

    def copy(self) -> Thoughts:
        """Another one, which goes on as this one does."""
        other = Thoughts.__new__(Thoughts)
        other.__dict__.update(self.__dict__)
        other._due = self._due.copy()
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def _begin(self, n_left: int) -> None:
        self._left = n_left
        self._decoder.reset()
        if n_left <= 0:
            self._finish()

    def _finish(self) -> None:
        self._left = None
        self._end = b""
        self._due.extend(self._closing)

"""Pieces of tokens to text: characters that span tokens, and stop strings that span pieces."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterable
from typing import AnyStr

from pykvgraph.checks import strings


class Lines:
    """Looks at a text as it is said. n_indent: spaces and tabs that each line but the first begins with.

    seconds: the text ends with the first line that ends so long after its first token; 0: no limit. Both are
    for programs that complete code while somebody types (llama-server's n_indent and t_max_predict_ms).
    """

    def __init__(self, n_indent: int, seconds: float) -> None:
        self._n_indent = n_indent
        self._seconds = seconds
        self._first = 0.0
        self._n = -1  # the spaces so far of the line that begins; -1: it has begun

    def end_of(self, text: str) -> int:
        """Where it ends in the next piece of text; -1: it goes on."""
        self._first = self._first or time.perf_counter()
        if self._n_indent:
            for at, character in enumerate(text):
                if self._n >= 0 and character in " \t":
                    self._n += 1
                elif 0 <= self._n < self._n_indent:
                    return at
                else:
                    self._n = 0 if character == "\n" else -1
        is_late = self._seconds and time.perf_counter() - self._first > self._seconds
        return len(text) if is_late and "\n" in text else -1


class Detokenizer:
    """Bytes in, text out, up to the first stop string; what may become one is held back until it is decided.

    The text is the same however the bytes are cut. Of several stop strings the first to be complete counts.
    """

    def __init__(self, stop: str | Iterable[str] = ()) -> None:
        """`stop`: one string or several. Raises InvalidArgumentError for an empty one, or what is no text."""
        self._stop = strings(stop, "stop")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopping_word = ""  # the stop string that came

    def copy(self) -> Detokenizer:
        """Another one, which goes on as this one does."""
        other = Detokenizer.__new__(Detokenizer)
        other.__dict__.update(self.__dict__)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def feed(self, data: bytes) -> str:
        """Text that is certain by now. Once a stop string came, stopping_word is it, and nothing follows."""
        text = self._decoder.decode(data)
        return self._advance(text) if self._stop else text

    def finish(self) -> str:
        """What was held back: no more bytes come. Half a character becomes U+FFFD."""
        text = self._advance(self._decoder.decode(b"", True)) + self._held
        self._held = ""
        return text

    def _advance(self, text: str) -> str:
        if self.stopping_word:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            end, at = min(matches)
            self.stopping_word = text[at:end]
            self._held = ""
            return text[:at]
        certain = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[certain:]
        return text[:certain]


def overlap(text: AnyStr, stop: AnyStr) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)

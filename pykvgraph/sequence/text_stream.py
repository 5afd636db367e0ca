"""Pieces of tokens to text: characters that span tokens, and stop strings that span pieces."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import AnyStr

from pykvgraph.checks import strings


class TextStream:
    """Bytes in, text out, up to the first stop string; what may become one is held back until it is decided.

    The text is the same however the bytes are cut. Of several stop strings the first to be complete counts.
    """

    def __init__(self, stop: str | Iterable[str] = ()) -> None:
        """`stop`: one string or several. Raises InvalidArgumentError for an empty one, or what is no text."""
        self._stop = strings(stop, "stop")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopping_word = ""  # the stop string that came

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

"""Where a text of lines ends: at a line that is indented too little, or that comes too late."""

from __future__ import annotations

import time


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

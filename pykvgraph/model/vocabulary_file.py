"""The file of a vocabulary, for whoever has to read it again."""

from __future__ import annotations

import os
import weakref


class VocabularyFile:
    """The file that a vocabulary was read from, which stays open: another one may have its name by now.

    number: a descriptor, of which this makes its own. overrides: libllama's array of them, as bytes.
    """

    def __init__(self, number: int, overrides: bytes) -> None:
        self.number = os.dup(number)
        self.overrides = overrides
        weakref.finalize(self, os.close, self.number)

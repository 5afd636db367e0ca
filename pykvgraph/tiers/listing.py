"""What is known of the files of a directory of records: sizes, when they were used, where texts end."""

from __future__ import annotations

import threading
from typing import NamedTuple


class RecordFile(NamedTuple):
    """A record's file as it was when it was seen last. parent, tokens: of the end of a text, else empty."""

    name: str
    n_bytes: int
    used: int  # nanoseconds, by any process
    parent: bytes
    tokens: bytes


class Listing:
    """Files by key; for several threads. n_bytes: of all of them, and of those that are being written."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.files: dict[bytes, RecordFile] = {}
        self._ends: dict[bytes, dict[bytes, bytes]] = {}  # by parent: keys, by tokens
        self._lock = threading.Lock()

    def count(self, n_bytes: int) -> None:
        """So many bytes more are there."""
        with self._lock:
            self.n_bytes += n_bytes

    def add(self, key: bytes, file: RecordFile) -> None:
        """A file whose bytes are counted."""
        with self._lock:
            self.files[key] = file
            if file.tokens:
                self._ends.setdefault(file.parent, {})[file.tokens] = key

    def use(self, key: bytes, now: int) -> None:
        """It was used."""
        with self._lock:
            if file := self.files.get(key):
                self.files[key] = file._replace(used=now)

    def forget(self, key: bytes) -> None:
        """It has gone, and its bytes with it."""
        with self._lock:
            file = self.files.pop(key, None)
            if file is None:
                return
            self.n_bytes -= file.n_bytes
            ends = self._ends.get(file.parent, {})
            if ends.get(file.tokens) == key:
                del ends[file.tokens]
                if not ends:
                    del self._ends[file.parent]

    def ends(self, parent: bytes) -> list[bytes]:
        """Tokens of the ends of texts behind a block."""
        with self._lock:
            return list(self._ends.get(parent, ()))

    def oldest_first(self) -> list[bytes]:
        """Keys, the one used longest ago first."""
        with self._lock:
            return sorted(self.files, key=lambda key: self.files[key].used)

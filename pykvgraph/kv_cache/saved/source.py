"""Where a saved state is read from: piece by piece, so that what is large is read when it is known to fit."""

from __future__ import annotations

import os
from typing import BinaryIO, Protocol

from pykvgraph.errors import StateError


class Source(Protocol):
    """Bytes of which any piece can be asked for."""

    @property
    def size(self) -> int:
        """How many there are."""

    def read(self, offset: int, n_bytes: int) -> memoryview:
        """A piece. Raises StateError when it goes beyond the end."""


class BytesSource:
    """A state in memory. Nothing is copied."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self._data)

    def read(self, offset: int, n_bytes: int) -> memoryview:
        """A view of a piece."""
        return _whole(self._data[offset : offset + n_bytes], n_bytes)


class FileSource:
    """A state in an open file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, offset: int, n_bytes: int) -> memoryview:
        """Reads a piece."""
        if offset + n_bytes > self.size:  # before memory is taken for it
            return _whole(memoryview(b""), n_bytes)
        self._file.seek(offset)
        try:
            return _whole(memoryview(self._file.read(n_bytes)), n_bytes)
        except MemoryError:  # a window's cells may be more than go into it
            raise StateError(f"a section of {n_bytes} bytes is more than there is memory for") from None


def _whole(piece: memoryview, n_bytes: int) -> memoryview:
    if len(piece) != n_bytes:
        raise StateError("the saved state is cut off; save it again")
    return piece

"""Bytes in several pieces, on their way to one system call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Pieces = Sequence[bytes | memoryview]

_MOST_PIECES = 512  # the system takes 1,024
_ENOUGH_BYTES = 512 << 10  # a call has cost little beside so many


def gathered(pieces: Iterable[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    """As many pieces at a time as are worth a call, in their order; at least one of them."""
    together: list[bytes | memoryview] = []
    n_bytes = 0
    for piece in pieces:
        together.append(piece)
        n_bytes += len(piece)
        if n_bytes >= _ENOUGH_BYTES or len(together) == _MOST_PIECES:
            yield together
            together, n_bytes = [], 0
    if together:
        yield together


def behind(pieces: Pieces, n_bytes: int) -> Pieces:
    """What is left of them when so many bytes have gone."""
    left: list[bytes | memoryview] = []
    for piece in pieces:
        if n_bytes < len(piece):
            left.append(memoryview(piece)[n_bytes:])
        n_bytes = max(0, n_bytes - len(piece))
    return left


def size_of(pieces: Pieces) -> int:
    """Their bytes."""
    return sum(map(len, pieces))

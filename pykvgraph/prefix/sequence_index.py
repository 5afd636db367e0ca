"""The index of prefixes of one sequence's texts, whose calls Ctrl-C may interrupt."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeVar

from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError, NotCopied
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.prefix.match import Found

R = TypeVar("R")


class SequenceIndex(NotCopied):
    """What one sequence's earlier texts began with, for a TokenSequence and whoever owns it.

    A change of an index is many steps. Where KeyboardInterrupt ends one in the middle, nodes may stay pinned
    for good, and parents and children disagree. Then the next use gives back all of its cells, and goes on
    with an empty index: what it had is decoded again.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._is_torn = False  # a change was interrupted

    def use(self, do: Callable[[PrefixIndex], R]) -> R:
        """What do(index) returns, which may change the index; raises what that raises."""
        if self._is_torn:
            self.renew()
        self._is_torn = True
        try:
            result = do(self._index)
        except Exception:  # which KeyboardInterrupt is not
            self._is_torn = False
            raise
        self._is_torn = False
        return result

    def renew(self) -> None:
        """Goes on with an empty index; the cells that nobody but this one kept are empty then."""
        self._index = self._index.renewed()
        self._is_torn = False

    def keep(self, ids: array[int], n: int, seq: int, salt: bytes = b"") -> None:
        """PrefixIndex.keep()"""
        self.use(lambda index: index.keep(ids, n, seq, salt))

    def find(self, ids: array[int], limit: int, salt: bytes = b"") -> Found:
        """PrefixIndex.find()"""
        return self.use(lambda index: index.find(ids, limit, salt))

    def show(self, found: Found, seq: int) -> bool:
        """Shows what was found to an empty sequence; False: kv.clear() has ended the holds, all go."""
        try:
            # the sequence sees the cells, and so they stay
            self.use(lambda index: index.unpin(index.attach(found, seq)))
        except InvalidArgumentError:
            self.renew()
            return False
        return True

    def make_room(self, n: int) -> bool:
        """PrefixIndex.make_room()"""
        return self.use(lambda index: index.make_room(n))

    def clear(self) -> None:
        """PrefixIndex.clear()"""
        self.use(PrefixIndex.clear)


def needs_points(ctx: Context) -> bool:
    """Whether texts go on from resume points only.

    Holds keep no cells of a window, also where the window of a small context keeps everything.
    """
    return any(g.kind == "state" or (g.kind == "window" and not ctx.swa_full) for g in ctx.kv.groups)

"""Work that nobody waits for any more: what it does looks now and then whether it is still wanted."""

from __future__ import annotations

import ctypes
from contextvars import ContextVar

from pykvgraph.errors import KVGraphError


class AbandonedError(KVGraphError):
    """Ends work that nobody waits for any more. Nobody hears of it."""


class Wanted:
    """Whether a piece of work is wanted; any thread may say that it isn't."""

    def __init__(self) -> None:
        self.stop = ctypes.c_int32(0)  # native calls read it while they run

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        self.stop.value = 1

    def require(self) -> None:
        """Raises AbandonedError once nobody waits for it."""
        if self.stop.value:
            raise AbandonedError("nobody waits for this any more")


_ALWAYS = Wanted()
_work: ContextVar[Wanted] = ContextVar("work")


def work() -> Wanted:
    """Of what runs here; of anything that nobody can abandon, one that is always wanted."""
    return _work.get(_ALWAYS)


def begin(wanted: Wanted) -> None:
    """What this context does from now on is that work."""
    _work.set(wanted)

"""A hold of cells: the cells stay in the cache even when no sequence sees them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

from pykvgraph._native.ffi import KvgHold
from pykvgraph._native.handles import Handle
from pykvgraph._native.library import lib, sized
from pykvgraph.errors import InvalidArgumentError, NotCopied


class Hold(NotCopied):
    """What `kv.hold()` returns: it keeps the cells that held positions p0 to p1 - 1 of a sequence.

    The hold ends with release(), with `kv.clear()`, or when the program drops its last reference to the Hold.
    """

    __slots__ = ("_handle", "_id", "p0", "p1")

    def __init__(self, handle: Handle, number: int, p0: int, p1: int) -> None:
        self._handle = handle
        self._id = number  # 0: released by release()
        self.p0 = p0
        self.p1 = p1

    def release(self) -> None:
        """Ends the hold. Its cells that no sequence sees and no other hold keeps become empty.

        Raises InvalidArgumentError when the hold has already ended, or the context is closed.
        """
        self._handle.call(self._release)

    def _release(self, context: int) -> None:
        lib().kvg_kv_release(context, self._id)
        self._id = 0

    def __del__(self) -> None:
        # the garbage collector may run in any thread, also in the middle of a call: never wait or raise here
        with contextlib.suppress(Exception):
            if self._id:
                self._handle.call_later(release_quietly, self._id)

    def __repr__(self) -> str:
        return f"<Hold of positions {self.p0} to {self.p1 - 1}>"


class ResumePoint(Hold):
    """What `kv.resume_point()` returns: it keeps what layers with a window need to go on at position `p`.

    It ends as a Hold does. `kv.attach()` takes it after the holds of all positions before p.
    """

    __slots__ = ()

    @property
    def p(self) -> int:
        """The position of the next token."""
        return self.p0

    def __repr__(self) -> str:
        return f"<ResumePoint at position {self.p}>"


def release_quietly(context: int, number: int) -> None:
    """Ends a hold, if it has not ended yet."""
    with contextlib.suppress(InvalidArgumentError):  # kv.clear() has released it already
        lib().kvg_kv_release(context, number)


class HoldMaker:
    """Makes the holds and resume points of a cache; one interrupted by Ctrl-C ends what it made."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._held = sized(KvgHold)
        self._pointer = ctypes.byref(self._held)

    def hold(self, context: int, seq: int, p0: int, p1: int) -> Hold:
        held = self._make(lib().kvg_kv_hold, context, seq, p0, p1)
        return Hold(self._handle, held.id, held.p0, held.p1)

    def resume_point(self, context: int, seq: int, p: int) -> ResumePoint:
        held = self._make(lib().kvg_kv_resume_point, context, seq, p)
        return ResumePoint(self._handle, held.id, held.p0, held.p1)

    def _make(self, function: Any, *arguments: int) -> KvgHold:
        held = self._held
        held.id = 0
        self._handle.undo_unless_done(functools.partial(_undo, held))
        function(*arguments, self._pointer)
        return held


def _undo(held: KvgHold, context: int) -> None:
    """Ends a hold that was made, but whose caller got an exception after it (Ctrl-C)."""
    if held.id:
        release_quietly(context, held.id)

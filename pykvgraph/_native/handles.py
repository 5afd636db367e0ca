"""Native objects with an owner: one call at a time, freed once, never used after that."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from operator import methodcaller
from typing import Any, NoReturn, TypeVar

from pykvgraph.errors import CopyError, InvalidArgumentError

R = TypeVar("R")
C = TypeVar("C", bound="Closable")


class NotCopied:
    """What owns or reaches a native object: copy.copy, copy.deepcopy and pickle raise CopyError for it.

    A copy would be a second owner, which uses the native object after the first one has freed it.
    """

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """All three ask this. Raises CopyError."""
        name = type(self).__name__
        raise CopyError(f"a {name} can't be copied or pickled: share this one, or make a new one")


class _Object(NotCopied):
    """The part of a Handle that its finalizer holds, which must not hold the Handle itself."""

    def __init__(self, pointer: int, free: Callable[[int], None]) -> None:
        self.pointer = pointer
        self.free = free
        # recursive: a signal handler or the garbage collector in mid-call meets `busy`, not a deadlock
        self.lock = threading.RLock()
        self.busy = False
        self.closed = False
        self.n_calls = 0
        self.undo: Callable[[int], object] | None = None  # what the next call does first
        self.acquire = self.lock.acquire
        self.release = self.lock.release

    # To read `locked` takes the lock, to read `unlocked` gives it back. Python looks for signals after calls,
    # and not after an attribute is read: so KeyboardInterrupt can't come between the lock and its `try`, nor
    # between the end of a call and its return.
    locked = property(methodcaller("acquire"))
    unlocked = property(methodcaller("release"))

    def close(self) -> None:
        """Once: the finalizer sees to that."""
        with self.lock:
            self.closed = True
            self.n_calls += 1
            if not self.busy:
                self.free(self.pointer)


class Handle(NotCopied):
    """Owns a native object; freed by close(), the garbage collector or at interpreter exit, once.

    Calls from several threads wait for one another, and close() waits for the call that is under way.
    """

    def __init__(self, pointer: int, free: Callable[[int], None], name: str) -> None:
        self._object = _Object(pointer, free)
        self._name = name
        self._finalizer = weakref.finalize(self, self._object.close)

    @classmethod
    def open(
        cls, function: Callable[..., object], *arguments: Any, free: Callable[[int], None], name: str
    ) -> Handle:
        """Owns what function(*arguments, out) writes to its last argument; raises what that raises."""
        pointer = ctypes.c_void_p()
        function(*arguments, ctypes.byref(pointer))
        return cls(pointer.value or 0, free, name)

    def call(self, function: Callable[..., R], *arguments: Any) -> R:
        """function(pointer, *arguments), while no other thread calls.

        Raises InvalidArgumentError when the handle is closed, or in use further up in this very thread.
        """
        target = self._object
        _ = target.locked
        try:
            if target.closed:
                raise InvalidArgumentError(f"the {self._name} is closed: make a new one")
            if target.busy:
                raise InvalidArgumentError(
                    f"the {self._name} is in use by the call that this one interrupted"
                )
            target.busy = True
            target.n_calls += 1
            try:
                if target.undo is not None:
                    target.undo(target.pointer)
                    target.undo = None
                result = function(target.pointer, *arguments)
                target.undo = None  # no signal comes between this line and the caller's next one
                return result
            finally:
                target.busy = False
                if target.closed:  # closed from within the call
                    target.free(target.pointer)
        finally:
            _ = target.unlocked

    def undo_unless_done(self, undo: Callable[[int], object]) -> None:
        """For a function that `call` runs: when an exception ends it, the next call does undo(pointer) first.

        So nothing can come between the exception and the undoing of what was done: not a second Ctrl-C, and
        not one in the last moments of the call. `undo` may be called twice when it is interrupted itself. It
        must not hold this handle's owner, which would live as long as the undoing is owed.
        """
        self._object.undo = undo

    @property
    def n_calls(self) -> int:
        """Calls that were begun so far, close() being one: while it is the same, the object is too."""
        return self._object.n_calls

    def close(self) -> None:
        """Frees the object. A second call does nothing."""
        self._finalizer()


class Closable(NotCopied):
    """What owns a handle: closed by hand, or by the end of a `with` block."""

    _handle: Handle

    def close(self) -> None:
        """Frees what it holds, after the call that is under way. A second call does nothing; others raise."""
        self._handle.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

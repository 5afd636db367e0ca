"""Native objects with an owner: freed once, never used after that, never freed under a running call.

At exit, Python lets daemon threads run on while the libraries under them are torn down. So the process ends
only when no call is under way, and none can begin any more.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from operator import methodcaller
from typing import Any, TypeVar

from pykvgraph.errors import InvalidArgumentError, NotCopied

R = TypeVar("R")
C = TypeVar("C", bound="Closable")

_CLOSED = "is closed: make a new one"
_ENDING = "is closed: Python is ending"
_FORKED = "was used by another thread when this process was forked: make a new one in this process"
_LEFT_BEHIND = "is on a device that works only in the process that was forked: use device='cpu' here"


class _Object(NotCopied):
    """The part of a Handle that its finalizer holds, which must not hold the Handle itself.

    Dictionaries and lists are changed by single operations, which neither threads nor signals interrupt.
    """

    def __init__(self, pointer: int, free: Callable[[int], None], shared: bool) -> None:
        self.pointer = pointer
        self.shared = shared
        self.changes: _Object | None = None  # what its calls change too, without being calls on it
        self.refusal = ""  # why no call may begin
        self.has_device = False  # whose driver stays with this process
        self.calls: dict[object, int] = {}  # those under way, with their threads
        self.n_calls = 0
        self._to_free = [free]  # empty once it was freed
        self.undo: Callable[[int], object] | None = None  # what the next call does first
        self.later: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()  # and second
        self.acquire: Callable[..., object] = bool  # nothing to wait for when it is shared
        self.release: Callable[[], object] = bool
        if not shared:
            self.renew_lock()

    # To read `locked` takes the lock, to read `unlocked` gives it back. Python looks for signals after calls,
    # and not after an attribute is read: so KeyboardInterrupt can't come between the lock and its `try`, nor
    # between the end of a call and its return.
    locked = property(methodcaller("acquire"))
    unlocked = property(methodcaller("release"))

    def renew_lock(self) -> None:
        """Recursive: a signal handler or the garbage collector in mid-call meets `calls`, not a deadlock."""
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release

    def do_later(self) -> None:
        """What finalizers left to a call, within that call; again when it is interrupted."""
        while self.later:
            function, arguments = self.later[0]
            function(self.pointer, *arguments)
            self.later.popleft()

    def close(self, refusal: str = _CLOSED) -> None:
        """No call begins any more. Waits for other threads; a shared one is freed by the last of them."""
        _ = self.locked
        try:
            self.refusal = self.refusal or refusal
            self.n_calls += 1
            self.free_if_idle()
        finally:
            _ = self.unlocked

    def free_if_idle(self) -> None:
        """Of a closed object: whoever leaves last frees it."""
        if not self.calls:
            with contextlib.suppress(IndexError):  # somebody else was quicker
                self._to_free.pop()(self.pointer)

    def forked(self) -> None:
        """In the child, whose other threads are gone: a call that they were in will never end.

        What such a call was changing is neither used nor freed. What is shared, calls only read.
        """
        here = threading.get_ident()
        if self.has_device:
            self._give_up(_LEFT_BEHIND)
        for call, thread in tuple(self.calls.items()):
            if thread != here:
                del self.calls[call]
                for each in (self, self.changes) if not self.shared else ():
                    if each is not None:
                        each._give_up(_FORKED)
        if not self.shared and not self.calls:  # else the lock is this thread's
            self.renew_lock()

    def _give_up(self, refusal: str) -> None:
        """It is neither used nor freed."""
        self.refusal = self.refusal or refusal
        self.n_calls += 1
        self._to_free.clear()

    def wait_for_threads(self) -> None:
        """Until no other thread is in a call."""
        here = threading.get_ident()
        while any(thread != here for thread in tuple(self.calls.values())):
            time.sleep(0.001)


_objects: weakref.WeakSet[_Object] = weakref.WeakSet()


class Handle(NotCopied):
    """Owns a native object; freed by close(), the garbage collector or at interpreter exit, once.

    Calls from several threads wait for one another, and close() waits for the call that is under way. When it
    is shared, calls run side by side, close() doesn't wait, and the last call that was under way frees it.
    """

    def __init__(self, pointer: int, free: Callable[[int], None], name: str, shared: bool = False) -> None:
        self._object = _Object(pointer, free, shared)
        self._name = name
        self._finalizer = weakref.finalize(self, self._object.close)
        _objects.add(self._object)

    @classmethod
    def own(
        cls,
        make: Callable[..., int],
        *arguments: Any,
        free: Callable[[int], None],
        name: str,
        shared: bool = False,
    ) -> Handle:
        """Owns what make(*arguments) returns; raises what that raises."""
        return ALONE.call(lambda _: cls(make(*arguments), free, name, shared))

    @classmethod
    def open(
        cls,
        function: Callable[..., object],
        *arguments: Any,
        free: Callable[[int], None],
        name: str,
        shared: bool = False,
    ) -> Handle:
        """Owns what function(*arguments, out) writes to its last argument; raises what that raises.

        What was made is freed also when Ctrl-C comes right after that.
        """
        made = ctypes.c_void_p()
        handle = cls(0, lambda _: free(made.value) if made.value else None, name, shared)

        def make(_: int) -> None:
            function(*arguments, ctypes.byref(made))
            handle._object.pointer = made.value or 0

        ALONE.call(make)
        return handle

    def stay(self) -> None:
        """It has something of a device, whose driver a fork leaves to this process."""
        self._object.has_device = True

    def changes(self, other: Handle) -> None:
        """Calls on this one change the other's native object, too: a fork in their midst spoils both."""
        self._object.changes = other._object

    def call(self, function: Callable[..., R], *arguments: Any) -> R:
        """function(pointer, *arguments), while no other thread calls unless the handle is shared.

        Raises InvalidArgumentError when the handle is closed, or in use further up in this very thread.
        """
        target = self._object
        _ = target.locked
        try:
            if target.calls and not target.shared and not target.refusal:
                raise InvalidArgumentError(
                    f"the {self._name} is in use by the call that this one interrupted"
                )
            this = object()
            target.n_calls += 1
            try:
                target.calls[this] = threading.get_ident()
                # looked at only now: whoever refuses calls looks for those under way after that
                if target.refusal:
                    raise InvalidArgumentError(f"the {self._name} {target.refusal}")
                if target.undo is not None:
                    target.undo(target.pointer)
                    target.undo = None
                if target.later:
                    target.do_later()
                result = function(target.pointer, *arguments)
                target.undo = None  # no signal comes between this line and the caller's next one
                return result
            finally:
                if this in target.calls:
                    del target.calls[this]  # by no call, after which Python would look for signals
                if target.refusal:  # closed meanwhile
                    target.free_if_idle()
        finally:
            _ = target.unlocked

    def together(self, function: Callable[[], R]) -> R:
        """function(), whose calls on this object are one to other threads: none of theirs comes between."""
        target = self._object
        _ = target.locked
        try:
            return function()
        finally:
            _ = target.unlocked

    def undo_unless_done(self, undo: Callable[[int], object]) -> None:
        """For a function that `call` runs: when an exception ends it, the next call does undo(pointer) first.

        So nothing can come between the exception and the undoing of what was done: not a second Ctrl-C, and
        not one in the last moments of the call. `undo` may be called twice when it is interrupted itself. It
        must not hold this handle's owner, which would live as long as the undoing is owed.
        """
        self._object.undo = undo

    def call_later(self, function: Callable[..., object], *arguments: Any) -> None:
        """function(pointer, *arguments) for a finalizer, which may not wait: now, or as the next call begins.

        For a handle that isn't shared. `function` must not raise, and may be called twice. Once the handle is
        closed, it isn't called.
        """
        target = self._object
        target.later.append((function, arguments))
        if target.acquire(False):
            try:
                if not (target.calls or target.refusal):
                    self.call(_nothing)
            finally:
                target.release()

    @property
    def closed(self) -> bool:
        """Whether every call is refused from now on."""
        return bool(self._object.refusal)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._object.calls)

    @property
    def n_calls(self) -> int:
        """Calls that were begun so far, close() being one: while it is the same, the object is too."""
        return self._object.n_calls

    def close(self) -> None:
        """Frees the object. A second call does nothing."""
        self._finalizer()


def repr_of(owner: object, describe: Callable[[], str]) -> str:
    """What an owner of a handle is, for its `__repr__`; never raises, also when `owner` is only half made."""
    name = type(owner).__name__
    try:
        return f"<{name}: {describe()}>"
    except Exception:
        return f"<{name}>"


def _nothing(_pointer: int) -> None:
    """A call that only does what was left to it."""


# for calls with no object of their own, such as those that make one
ALONE = Handle(0, lambda _: None, "library", shared=True)


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


@atexit.register
def _end() -> None:
    """Refuses new calls, and waits for those that daemon threads are in."""
    try:
        ALONE._object.close(_ENDING)
        ALONE._object.wait_for_threads()  # no new objects after that
        for target in tuple(_objects):
            target.close(_ENDING)
            target.wait_for_threads()
    except KeyboardInterrupt:
        # whoever can't wait gets the end that asks nobody: going on would free what the call uses
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _in_child() -> None:
    for target in tuple(_objects):
        target.forked()


os.register_at_fork(after_in_child=_in_child)

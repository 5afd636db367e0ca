"""After os.fork() only the thread that called it goes on: what others held in the child is let go there."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

# What is imported when first used is imported under this: a fork waits for it, as in the child the import of
# another thread would never end.
importing = threading.RLock()
os.register_at_fork(
    before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release
)

# with the attribute that holds the lock
_with_locks: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def renew_lock_in_child(owner: object, name: str) -> None:
    """A child gets a new RLock as attribute `name` of `owner`: the old one's holder may not be there."""
    _with_locks[owner] = name


def renew_cached_properties_in_child(kind: type) -> None:
    """Before Python 3.12 a cached_property has one lock for all objects of its class."""
    for value in vars(kind).values():
        if isinstance(value, functools.cached_property) and hasattr(value, "lock"):
            renew_lock_in_child(value, "lock")


def _in_child() -> None:
    for owner, name in list(_with_locks.items()):
        setattr(owner, name, threading.RLock())


os.register_at_fork(after_in_child=_in_child)

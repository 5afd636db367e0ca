"""pykvgraph's exceptions, and the one place where a status of the native library becomes an exception."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from pykvgraph._native.ffi import KvgStatus


class KVGraphError(Exception):
    """The base of pykvgraph's exceptions; raised itself for broken logits, and for a bug in kvgraph."""


class ModelLoadError(KVGraphError, ValueError):
    """The file is not a GGUF model, or it is damaged or can't be read."""


class InvalidArgumentError(KVGraphError, ValueError):
    """An argument has a value that the call doesn't accept; the call changed nothing."""


class CopyError(InvalidArgumentError, TypeError):
    """The object can't be copied or pickled, because it owns memory of the native library."""


class CacheFullError(KVGraphError, RuntimeError):
    """The cache has fewer empty cells than the call needs; the call changed nothing."""


class UnsupportedError(KVGraphError, NotImplementedError):
    """The request is valid, but this build, model or device can't do it; the call changed nothing."""


class StateError(KVGraphError, ValueError):
    """A saved state is damaged, or was saved with another model or another kind of cache."""


class DeviceError(KVGraphError, RuntimeError):
    """A device is missing, out of memory, or failed.

    The cache has the tokens and positions that it had before the call. A defrag or a K-shift that was pending
    may have been done, or is still pending. When the device fails in the middle of a K-shift, a sorting
    defrag or a load, K and V are unusable: every call that needs them then raises DeviceError, until
    `KVCache.clear()`.
    """


class TransportError(KVGraphError, ConnectionError):
    """The other end of a stream is gone, stalled, or sends what is not right. This end is closed then."""


_CLASSES: dict[int, type[Exception]] = {
    KvgStatus.KVG_INVALID_ARGUMENT: InvalidArgumentError,
    KvgStatus.KVG_MODEL_LOAD: ModelLoadError,
    KvgStatus.KVG_CACHE_FULL: CacheFullError,
    KvgStatus.KVG_UNSUPPORTED: UnsupportedError,
    KvgStatus.KVG_DEVICE: DeviceError,
}


def errcheck(last_error: Callable[[], bytes]) -> Callable[[int, Any, tuple[Any, ...]], None]:
    """A ctypes `errcheck` for functions that return a status; last_error() gives this thread's message."""

    def check(status: int, _function: Any, arguments: tuple[Any, ...]) -> None:
        if status != KvgStatus.KVG_OK:
            message = last_error().decode("utf-8", "replace")
            if status == KvgStatus.KVG_NOT_FOUND:
                raise _not_found(message, arguments)
            raise _CLASSES.get(status, KVGraphError)(message)

    return check


def _not_found(message: str, arguments: tuple[Any, ...]) -> FileNotFoundError:
    """The error that Python's own open() would raise: the path is the native call's first argument."""
    path = arguments[0] if arguments and isinstance(arguments[0], bytes) else None
    # only the system's words: Python writes errno before them and the path after them
    if path is None:
        return FileNotFoundError(errno.ENOENT, message)
    text = message.removeprefix(f"{path.decode('utf-8', 'replace')} can't be opened: ")
    return FileNotFoundError(errno.ENOENT, text, os.fsdecode(path))

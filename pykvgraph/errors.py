"""Every exception that pykvgraph raises of itself, and the one place where a native status becomes one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from pykvgraph._native.ffi import KvgStatus


class KVGraphError(Exception):
    """Base of all errors here; raised as itself only for a bug in kvgraph."""


class ModelLoadError(KVGraphError, ValueError):
    """A file that is no model, or a damaged one."""


class InvalidArgumentError(KVGraphError, ValueError):
    """A value that no call may have; nothing was changed."""


class CopyError(InvalidArgumentError, TypeError):
    """An object that can be neither copied nor pickled, because it owns something native."""


class CacheFullError(KVGraphError, RuntimeError):
    """Not enough empty cells; nothing was changed."""


class UnsupportedError(KVGraphError, NotImplementedError):
    """Valid, but not something this build can do; nothing was changed."""


class StateError(KVGraphError, ValueError):
    """A saved sequence that is damaged, or of another model."""


class DeviceError(KVGraphError, RuntimeError):
    """A device is missing, out of memory, or failed."""


_CLASSES: dict[int, type[Exception]] = {
    KvgStatus.KVG_INVALID_ARGUMENT: InvalidArgumentError,
    KvgStatus.KVG_MODEL_LOAD: ModelLoadError,
    KvgStatus.KVG_CACHE_FULL: CacheFullError,
    KvgStatus.KVG_UNSUPPORTED: UnsupportedError,
    KvgStatus.KVG_DEVICE: DeviceError,
}


def errcheck(last_error: Callable[[], bytes]) -> Callable[[int, Any, tuple[Any, ...]], None]:
    """A ctypes `errcheck` for what returns a status; `last_error` tells the calling thread's message."""

    def check(status: int, _function: Any, arguments: tuple[Any, ...]) -> None:
        if status != KvgStatus.KVG_OK:
            message = last_error().decode("utf-8", "replace")
            if status == KvgStatus.KVG_NOT_FOUND:
                raise _not_found(message, arguments)
            raise _CLASSES.get(status, KVGraphError)(message)

    return check


def _not_found(message: str, arguments: tuple[Any, ...]) -> FileNotFoundError:
    """With errno and filename, as the system's own; the path is the call's first argument."""
    path = arguments[0] if arguments and isinstance(arguments[0], bytes) else b""
    # Python puts the name behind the message by itself
    text = message.removeprefix(f"{path.decode('utf-8', 'replace')} ") if path else message
    return FileNotFoundError(errno.ENOENT, text, *([os.fsdecode(path)] if path else []))

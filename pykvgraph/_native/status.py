"""The one place where a status of the native library becomes an exception."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from pykvgraph._native.ffi import KvgStatus
from pykvgraph.errors import (
    CacheFullError,
    DeviceError,
    InvalidArgumentError,
    KVGraphError,
    ModelLoadError,
    UnsupportedError,
)

_NOT_OPENED = " can't be opened: "
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
        if status:  # KVG_OK is 0; to look it up by its name would cost each call 0.1 us
            message = last_error().decode("utf-8", "replace")
            if status == KvgStatus.KVG_NOT_FOUND:
                raise _not_found(message, arguments)
            raise _CLASSES.get(status, KVGraphError)(message)

    return check


def _not_found(message: str, arguments: tuple[Any, ...]) -> FileNotFoundError:
    """The error that Python's own open() would raise. The path is the native call's first argument, or
    one that it got in a record, which the message begins with then.
    """
    path = arguments[0] if arguments and isinstance(arguments[0], bytes) else None
    # only the system's words: Python writes errno before them and the path after them
    if path is None:
        return FileNotFoundError(errno.ENOENT, message)
    name, opened, text = message.partition(_NOT_OPENED)
    if opened and not message.startswith(f"{path.decode('utf-8', 'replace')}{_NOT_OPENED}"):
        return FileNotFoundError(errno.ENOENT, text, name)
    text = message.removeprefix(f"{path.decode('utf-8', 'replace')}{_NOT_OPENED}")
    return FileNotFoundError(errno.ENOENT, text, os.fsdecode(path))

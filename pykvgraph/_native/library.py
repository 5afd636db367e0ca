"""The one libkvgraph of this process: its functions raise our errors, its log goes to Python's."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from pykvgraph import env
from pykvgraph._native import ffi, loader
from pykvgraph._native.status import errcheck

S = TypeVar("S", bound=ctypes.Structure)

logger = logging.getLogger("pykvgraph")

# kvg_log_set's levels
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


@functools.cache
def library() -> loader.Library:
    """Opens libkvgraph on the first call. Raises ImportError as the loader tells."""
    level = env.log_level()
    loaded = loader.load()
    check = errcheck(loaded.lib.kvg_last_error)
    for name in ffi.STATUS_FUNCTIONS:
        getattr(loaded.lib, name).errcheck = check
    if level is not None:
        _show_log(level)
    take_log(loaded.lib)
    if loaded.had_openmp:
        logger.info(
            "libgomp was in this process before pykvgraph: how its threads wait was settled then "
            "(docs/environment-variables.md)"
        )
    # threads that outlive the interpreter must not call into it
    atexit.register(loaded.lib.kvg_log_set, ffi.KvgLogCallback(), None)
    return loaded


def _show_log(level: int) -> None:
    """From `level` on to Python's logging; to stderr while the program has set up none."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logger.addHandler(handler)
    logger.setLevel(level)


def log_from(word: str) -> None:
    """As if KVGRAPH_LOG were this word, here and in processes that are started from here."""
    _show_log(env.set_log_level(word))
    take_log(lib())


def lib() -> Any:
    """libkvgraph's functions; a status that is not OK becomes an exception (status.py)."""
    return library().lib


def take_log(native: Any) -> None:
    """Directs the native log, ggml's included, to us; again after libllama's is set, which sets ggml's."""
    native.kvg_log_set(_forward_log if env.log_level() is not None else ffi.KvgLogCallback(), None)


def _forward(level: int, text: bytes | None, _user_data: int | None) -> None:
    # called in any thread; an exception of a log handler is shown by ctypes on stderr and goes no further
    line = (text or b"").decode("utf-8", "replace").rstrip()
    if line:
        logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


# ctypes frees a callback that nobody holds
_forward_log = ffi.KvgLogCallback(_forward)


def sized(struct: type[S], **fields: Any) -> S:
    """A struct with `struct_size` set, as every call wants it."""
    return struct(struct_size=ctypes.sizeof(struct), **fields)


def fetch(function: Callable[..., Any], *arguments: Any) -> int:
    """The int64 that a native function writes through its last argument."""
    out = ctypes.c_int64()
    function(*arguments, ctypes.byref(out))
    return out.value

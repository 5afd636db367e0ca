"""libllama, of llama-cpp-python: tokenizer and samplers only; imported when first wanted."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from pykvgraph._native import loader
from pykvgraph._native.fork import renew_lock_in_child
from pykvgraph._native.library import lib, take_log

_LOGGER = "llama-cpp-python"
# above every level: llama_cpp takes warnings for errors and errors for debugging, so no level sorts them
_SILENT = logging.CRITICAL + 1
_lock = threading.RLock()
renew_lock_in_child(sys.modules[__name__], "_lock")
# A fork waits until llama_cpp is imported: in the child the import of another thread would never end.
_importing = threading.RLock()
os.register_at_fork(
    before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
)


@functools.cache
def low_level() -> Any:
    """llama_cpp's module of libllama's functions.

    Raises ImportError when importing it brings a second ggml into the process.
    """
    logger = logging.getLogger(_LOGGER)
    if "llama_cpp" not in sys.modules and logger.level == logging.NOTSET:
        logger.setLevel(_SILENT)  # unset, it prints libllama's every line; llama_cpp.Llama sets its own
    with _importing:
        module = importlib.import_module("llama_cpp.llama_cpp")
    take_log(lib())
    loader.check_not_doubled(loader.mapped_libraries(loader.read_maps()))
    return module


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines of libllama on stderr meanwhile; the program's own choice of level returns after it."""
    logger = logging.getLogger(_LOGGER)
    with _lock:
        level = logger.level
        logger.setLevel(_SILENT)
        try:
            yield
        finally:
            logger.setLevel(level)

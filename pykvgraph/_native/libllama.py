"""libllama, of llama-cpp-python: tokenizer and samplers only; opened when first wanted."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pykvgraph._native import llama_ffi, loader
from pykvgraph._native.fork import importing, renew_lock_in_child
from pykvgraph._native.library import lib, take_log

_PACKAGE = "llama_cpp"
_LOGGER = "llama-cpp-python"
# above every level: llama_cpp takes warnings for errors and errors for debugging, so no level sorts them
_SILENT = logging.CRITICAL + 1
_lock = threading.RLock()
renew_lock_in_child(sys.modules[__name__], "_lock")

# ctypes frees a callback that nobody holds
_say_nothing = llama_ffi.LogCallback(lambda _level, _text, _user_data: None)


def path() -> Path:
    """The file of libllama, which is llama_cpp's own when that is imported. Raises ImportError."""
    return loader.find_ggml_directory() / "libllama.so"


@functools.cache
def low_level() -> Any:
    """libllama's functions and structs, those of llama_ffi; llama_cpp isn't imported for them.

    Raises ImportError when libllama can't be opened or brings a second ggml into the process.
    """
    lib()  # which opens ggml
    with importing:
        file = path()
        library = loader.open_library(file, loader.INSTALL_GGML)
        try:
            llama = llama_ffi.declared(library)
        except AttributeError as error:
            raise ImportError(
                f"{file} is of another version of llama-cpp-python: {error}. Run: {loader.INSTALL_GGML}"
            ) from error
        if _PACKAGE not in sys.modules:  # else the log is llama_cpp's
            llama.llama_log_set(_say_nothing, None)
        take_log(lib())  # with libllama's log, ggml's went away
    loader.check_not_doubled(loader.mapped_libraries(loader.read_maps()))
    return llama


def package(name: str) -> Any:
    """A module of llama_cpp's by its name there, such as "llama_grammar"; imported without libllama's log."""
    low_level()
    logger = logging.getLogger(_LOGGER)
    if _PACKAGE not in sys.modules and logger.level == logging.NOTSET:
        logger.setLevel(_SILENT)  # unset, it prints libllama's every line; llama_cpp.Llama sets its own
    with importing:
        module = importlib.import_module(f"{_PACKAGE}.{name}")
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

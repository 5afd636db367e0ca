"""Ctrl-C while the command `pykvgraph` starts: exit code 130, and no traceback of imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_CODE = 130  # as shells have it


def is_the_command() -> bool:
    """Whether the command `pykvgraph` or `python -m pykvgraph` imports this package, not a program."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # Python is still looking for the module to run
        return "pykvgraph" in sys.orig_argv
    return os.path.basename(program) == "pykvgraph"


def end_at_ctrl_c() -> None:
    """From now on Ctrl-C ends the command at once; where it is ignored, it stays so.

    A KeyboardInterrupt in the midst of imports shows a traceback, or is swallowed by what is imported.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """In this block, where somebody catches it, Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(_CODE)

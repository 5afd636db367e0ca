"""Ctrl-C before any line of some code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def ctrl_c_at(n: int, work: Callable[[], object], *modules: ModuleType) -> bool:
    """Does the work, with Ctrl-C before the n-th line that it runs of these; whether it came to that line."""
    files = {module.__file__ for module in modules}
    n_lines = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal n_lines
        if frame.f_code.co_filename not in files:
            return None
        n_lines += event == "line"
        if n_lines == n and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False

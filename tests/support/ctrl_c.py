"""Ctrl-C in tests: shells start background jobs with it ignored, and so would be every process of a test."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, here and in processes that are started meanwhile."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

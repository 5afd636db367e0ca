"""Ctrl-C at a chosen moment, once or several times."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable


class Storm:
    """Ctrl-C, as a timer's signal: `n` of them, the first after a delay, 20 microseconds apart."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._left = 0
        self._raises = False
        self._before = signal.signal(signal.SIGALRM, self._strike)
        self._hook = sys.unraisablehook
        # Ctrl-C in a finalizer goes nowhere; pytest's hook keeps it, and fails a later test if Ctrl-C
        # comes in the hook itself
        sys.unraisablehook = lambda _: None
        gc.disable()  # an exception in its callbacks goes nowhere

    def _strike(self, *_: object) -> None:
        self._left -= 1
        if self._left <= 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self._raises:
            raise KeyboardInterrupt

    def returned(self, work: Callable[[], object], delay: float) -> bool:
        """Whether work() returned, as KeyboardInterrupt came later."""
        done = False
        self._left = self._n
        self._raises = True
        try:
            signal.setitimer(signal.ITIMER_REAL, delay, 20e-6)
            work()
            done = True  # no signal comes between the return and these lines
            self._raises = False
        except KeyboardInterrupt:
            self._raises = False
        while self._left > 0:
            pass
        return done

    def end(self) -> None:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        sys.unraisablehook = self._hook


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

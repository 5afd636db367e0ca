"""An errand: what the engine does for a caller between two steps, with an empty sequence."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pykvgraph.prefix.index import PrefixIndex


class Errand:
    """do(index, seq) is called once, by whoever takes the steps; `done` has what it returned or raised.

    seq is empty before, and is emptied behind it.
    """

    def __init__(self, do: Callable[[PrefixIndex, int], Any]) -> None:
        self._do = do
        self.done: Future[Any] = Future()

    def run(self, index: PrefixIndex, seq: int) -> None:
        """Does it."""
        try:
            self.done.set_result(self._do(index, seq))
        except Exception as error:
            self.done.set_exception(error)

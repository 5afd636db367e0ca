"""What is left of texts whose windows gave up tokens, for the next turns of their conversations."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.context_window import Window
from pykvgraph.engine.own_rows import OwnRows
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.errors import KVGraphError
from pykvgraph.kv_cache.cache import KVCache


class _Left(NamedTuple):
    """Of one text. whole: its decoded tokens, also those that are gone. ids: those that have rows.

    n_least: how many of these there were when tokens were given up last.
    """

    whole: array[int]
    ids: array[int]
    n_least: int
    n_true: int
    salt: bytes
    window: Window
    rows: OwnRows

    def goes_on(self, other: _Left) -> bool:
        """Whether it begins with all of another one, and has its place."""
        is_same = (self.salt, self.window) == (other.salt, other.window)
        return is_same and self.whole[: len(other.whole)] == other.whole

    def n_common(self, sequence: RequestSequence) -> int:
        """How many tokens of a new text are read, if it goes on from this one; 0: it can't."""
        if (self.salt, self.window) != (sequence.exact_salt, sequence.window):
            return 0
        n = min(common_length(self.whole.tobytes(), sequence.ids.tobytes()), len(sequence.ids) - 1)
        return n if len(self.ids) - (len(self.whole) - n) >= self.n_least else 0


class ShortenedTexts:
    """The last `most` of them that ended. A text that begins with one of them, and has the same window, goes
    on from its rows: to read it from the beginning would give up the same tokens, and leave the same rows.

    Rows stay in their cells until others need these, and then in host memory.
    """

    def __init__(self, kv: KVCache, most: int) -> None:
        self._kv = kv
        self._most = most
        self._left: list[_Left] = []  # the newest last

    def add(self, sequence: RequestSequence) -> None:
        """It ends; its sequence still has its cells."""
        window, n, last = sequence.window, sequence.n_decoded, sequence.last
        if window is None or window.forget is None or not (sequence.runs and sequence.has_shifted):
            return
        # an edited text is found by its session alone; rows that age can't be taken out of the cache
        if last is None or sequence.salt != sequence.exact_salt or self._kv.ages:
            return
        try:
            rows = OwnRows(self._kv, sequence.seq, n, last.root)
        except (KVGraphError, MemoryError):
            return
        whole = sequence.read_ids()
        left = _Left(whole, sequence.ids[:n], sequence.n_left, sequence.n_true, sequence.salt, window, rows)
        self._drop([each for each in self._left if left.goes_on(each)])
        self._left.append(left)
        self._drop(self._left[: -self._most])

    def take(self, sequence: RequestSequence, n_had: int) -> bool:
        """A new text gets the rows that spare it the most tokens; False: none do. n_had: tokens that it need
        not decode anyhow."""
        best = max(self._left, key=lambda each: each.n_common(sequence), default=None)
        if best is None or (n := best.n_common(sequence)) <= n_had:
            return False
        self._left.remove(best)
        n_cut = len(best.whole) - n
        best.rows.n -= n_cut
        sequence.go_on_from(best.ids[: best.rows.n], n, best.n_true, best.n_least, best.rows)
        return True

    def copy_one(self, most_bytes: Callable[[], int]) -> bool:
        """The rows of one go from its cells to host memory; False: none has cells.

        most_bytes: how much memory there is for the rows of all; to ask takes a while. One for which there is
        none is given up.
        """
        first = next((each for each in self._left if each.rows.n_cells), None)
        if first is None:
            return False
        n_rows = sum(len(each.ids) for each in self._left if not each.rows.n_cells) + len(first.ids)
        try:
            if n_rows * sum(group.cell_bytes for group in self._kv.groups) > most_bytes():
                raise MemoryError
            first.rows.copy()
        except (KVGraphError, MemoryError):
            self._drop([first])
        return True

    def forget(self, ids: array[int], salt: bytes) -> None:
        """Gives up those that begin with a text, or that it begins with."""
        n = len(ids)
        self._drop(
            [
                each
                for each in self._left
                if each.salt == salt and (each.whole[:n] == ids or ids[: len(each.whole)] == each.whole)
            ]
        )

    def clear(self) -> None:
        """Gives up all of them."""
        self._drop(self._left)

    def _drop(self, gone: list[_Left]) -> None:
        for each in [*gone]:
            self._left.remove(each)
            each.rows.give_up()

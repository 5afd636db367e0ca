"""What steps took, as averages that follow the last ones."""

from __future__ import annotations

from bisect import bisect_left, insort

_WEIGHT = 0.2  # of the newest, in an average
_MOST = 3.0  # times the average that one step counts at most: machines are busy with other things, too
_EACH = 0.1  # of a step: what a token more takes, while nothing is known


def averaged(before: float, now: float) -> float:
    """The average with one value more; before 0.0: there was none yet."""
    return before + _WEIGHT * (now - before) if before else now


class StepSeconds:
    """Averages by number of tokens, and lines between them. For steps of few tokens, each of another text
    or at the end of one: what they have in the cache is not looked at."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # sorted
        self._seconds: dict[int, float] = {}

    def learn(self, n_rows: int, seconds: float) -> None:
        """What a step took."""
        before = self._seconds.get(n_rows)
        if before is None:
            insort(self._rows, n_rows)
            self._seconds[n_rows] = seconds
        else:
            self._seconds[n_rows] = averaged(before, min(seconds, _MOST * before))

    def of(self, n_rows: int) -> float:
        """What a step is expected to take; 0.0: no step was measured."""
        found = self._seconds.get(n_rows)
        if found is not None or not self._rows:
            return found or 0.0
        at = bisect_left(self._rows, n_rows)
        if at == 0:
            return self._seconds[self._rows[0]]
        low = self._rows[at - 1]
        if at < len(self._rows):
            high = self._rows[at]
            each = (self._seconds[high] - self._seconds[low]) / (high - low)
        elif at > 1:
            first = self._rows[0]
            each = (self._seconds[low] - self._seconds[first]) / (low - first)
        else:
            each = _EACH * self._seconds[low]
        return self._seconds[low] + each * (n_rows - low)

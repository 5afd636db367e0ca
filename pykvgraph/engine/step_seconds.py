"""What steps take, as averages that follow the last ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

_WEIGHT = 0.2  # of the newest, in an average
_MOST = 1.25  # times what was expected that one step counts at most: it made a graph, or the machine was busy
_EACH = 0.1  # of a step: what a token more takes, while nothing is known
_N_TRUSTED = 3  # steps of so many tokens, behind which one that lasts longer than _MOST is cut
_NEAR = 32  # tokens: texts that have so many more than in the step before are the same ones
_NEAR_PART = 16  # or this part of them


def averaged(before: float, now: float) -> float:
    """The average with one value more; before 0.0: there was none yet."""
    return before + _WEIGHT * (now - before) if before else now


class Seconds:
    """An average of seconds. The first time made graphs, too, and doesn't count."""

    def __init__(self) -> None:
        self.average = 0.0  # 0.0: nothing was measured
        self._is_first = True

    def learn(self, seconds: float) -> None:
        """What it took now."""
        if not self._is_first:
            self.average = averaged(self.average, min(seconds, _MOST * self.average or seconds))
        self._is_first = False


class StepSeconds:
    """A level, which follows the last steps, times a factor for each number of tokens; lines between factors.

    A step takes longer the more its texts have in the cache: the level follows that. A factor is learnt from
    steps that follow one of another number of tokens with the same texts, so there it cancels out. The first
    step of so many tokens makes their graph, and doesn't count.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []  # with factors, sorted
        self._factors: dict[int, float] = {}
        self._n_steps: Counter[int] = Counter()  # by number of tokens
        self._level = 0.0  # seconds
        self._last = 0  # tokens of the last step
        self._depth = 0

    def learn(self, n_rows: int, seconds: float, depth: int = 0) -> None:
        """What a step took. depth: tokens that its texts have in the cache, all together."""
        seconds = max(seconds, 1e-9)
        is_near = abs(depth - self._depth) <= max(_NEAR, depth // _NEAR_PART)
        is_switch = n_rows != self._last
        self._last, self._depth = n_rows, depth
        n_before, is_known = self._n_steps[n_rows], n_rows in self._factors
        self._n_steps[n_rows] += 1
        if not n_before or not (is_near or is_known or not self._level):
            return
        if not self._level:
            self._level = seconds / self._factor(n_rows)
        elif not is_near:
            self._level = seconds / self._factors[n_rows]
        ratio = seconds / self.of(n_rows)
        if n_before >= _N_TRUSTED:
            ratio = min(ratio, _MOST)
        if is_switch or not is_known:
            self._set(n_rows, self._factor(n_rows) * (1 + max(_WEIGHT, 1 / n_before) * (ratio - 1)))
        if is_known:
            self._level *= 1 + _WEIGHT * (min(ratio, _MOST) - 1)

    def _set(self, n_rows: int, factor: float) -> None:
        if n_rows not in self._factors:
            insort(self._rows, n_rows)
        self._factors[n_rows] = factor

    def knows(self, n_rows: int) -> bool:
        """Whether a step of so many tokens, or of fewer, was measured: below these there is no line."""
        return bool(self._rows) and self._rows[0] <= n_rows

    def of(self, n_rows: int) -> float:
        """What a step is expected to take; 0.0: no step was measured."""
        return self._level * self._factor(n_rows)

    def _factor(self, n_rows: int) -> float:
        found = self._factors.get(n_rows)
        if found is not None or not self._rows:
            return 1.0 if found is None else found
        at = bisect_left(self._rows, n_rows)
        if at == 0:
            return self._factors[self._rows[0]]
        low = self._rows[at - 1]
        if at < len(self._rows):
            return self._factors[low] + self._slope(low, self._rows[at]) * (n_rows - low)
        each = max(self._slope(self._rows[0], low), 0.0) if at > 1 else _EACH * self._factors[low]
        return self._factors[low] + each * (n_rows - low)

    def _slope(self, low: int, high: int) -> float:
        return (self._factors[high] - self._factors[low]) / (high - low)

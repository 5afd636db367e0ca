"""Whether drafts pay, and how long they should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.engine.step_seconds import StepSeconds

_KEPT = 0.95  # of what is known, with each token that is compared
_LONGEST_PAUSE = 8
_LONG = (4, 8)  # tokens that were the same: from each of these on, guesses are of another kind


class Acceptance:
    """Drafts of one text. A guess that many tokens speak for holds more often: there is a rate for each kind.

    drafted, accepted: tokens. Guesses that were not decoded count in the rates, too: the token that was said
    instead tells whether they would have held.
    """

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._pause = self._left = 0  # steps
        self._held = [0.0] * (len(_LONG) + 1)
        self._tried = [0.0] * (len(_LONG) + 1)
        self._unknown = [2.0] * (len(_LONG) + 1)  # guesses that count as the usual ones do

    def is_due(self) -> bool:
        """Whether to look for a draft in this step: less and less often while nothing comes of it."""
        self._left -= 1
        return self._left < 0

    def found(self, *, something: bool) -> None:
        """Whether what was looked for was there, or held."""
        self._pause = 0 if something else min(self._pause + 1, _LONGEST_PAUSE)
        self._left = self._pause

    def rate(self, n_same: int, usual: float = 0.5) -> float:
        """The share of guesses of this kind that hold; usual: while nothing is known."""
        kind = _kind(n_same)
        unknown = self._unknown[kind]
        return (self._held[kind] + unknown * usual) / (self._tried[kind] + unknown)

    def learn(self, n_same: int, n: int, n_held: int) -> None:
        """Of n tokens that were guessed so many held, and the next one, if there was one, didn't."""
        kind = _kind(n_same)
        for held in (True,) * n_held + (False,) * (n_held < n):
            self._held[kind] = self._held[kind] * _KEPT + held
            self._tried[kind] = self._tried[kind] * _KEPT + 1
            self._unknown[kind] *= _KEPT


def _kind(n_same: int) -> int:
    return sum(n_same >= least for least in _LONG)


_SELDOM = 256  # steps with drafts: then one has none
_TRIED = 0.004  # the share of time that may be lost by drafts that aren't expected to pay


class Gate:
    """Drafts are as long as makes the step say the most tokens a second, by what was measured.

    With n answers, a step says n tokens, and of a draft of k tokens rate + rate^2 + ... + rate^k
    more, where rate is how often a guess holds. It then lasts as long as steps of so many tokens did, and
    the making of the drafts takes its time. All drafts of a step are chosen together: a step may take much
    longer with a few tokens more, and hardly longer with many more. Texts whose guesses hold more often come
    first, and each that has a draft has one of the same length, or as long as it can have.

    What isn't expected to pay is tried all the same, for all texts, more often the less that may cost: nobody
    knows how long steps take, or how often guesses hold, where there are no drafts. So that steps without are
    known, too, the first two of so many texts have none, and one now and then.
    """

    def __init__(self) -> None:
        self.seconds = StepSeconds()
        self._spare = 0.0  # of a step: what tries may cost
        self._n_rows = 0
        self._n_said = 0
        self.has_refused = False  # in this step
        self._has_drafts = False
        self._n_with_drafts = 0  # steps, since one without
        self._is_without = False  # whether this step has no drafts, to see what it takes

    def begin(self, n_decoding: int, n_rows: int) -> None:
        """The next step, in which so many texts say a token each, and n_rows are decoded without drafts."""
        self._n_with_drafts = self._n_with_drafts + 1 if self._has_drafts else 0
        self._has_drafts = False
        self._is_without = self._n_with_drafts >= _SELDOM or not self.seconds.knows(n_rows)
        self._n_rows = n_rows
        self._n_said = n_decoding
        self.has_refused = False

    def lengths(self, asked: Sequence[tuple[float, int]], each: float = 0.0) -> list[int]:
        """How many tokens to draft of each text.

        asked: of each text the rate, and the most tokens. each: seconds, to make a token of a draft.
        """
        if self._is_without:
            return [0] * len(asked)
        order = sorted((i for i, (_, most) in enumerate(asked) if most), key=lambda i: -asked[i][0])
        best = _Plan(self._n_said / max(self.seconds.of(self._n_rows), 1e-9), 0, 0)
        of_all = _Plan(0.0, 0, 0)
        for size in _sizes(max((most for _, most in asked), default=0)):
            n, said = 0, float(self._n_said)
            for n_texts, i in enumerate(order, 1):
                rate, most = asked[i]
                n += min(size, most)
                said += _expected(rate, min(size, most))
                plan = _Plan(said / max(self.seconds.of(self._n_rows + n) + n * each, 1e-9), n_texts, size)
                best = max(best, plan, key=_speed)
            of_all = max(of_all, plan, key=_speed)
        if best.n_texts < len(order) and self._may_try(of_all.speed / best.speed):
            best = of_all
        self.has_refused, self._has_drafts = best.n_texts < len(order), best.n_texts > 0
        found = [0] * len(asked)
        for i in order[: best.n_texts]:
            found[i] = min(best.size, asked[i][1])
        return found

    def _may_try(self, share: float) -> bool:
        """share: of its speed that the step is expected to have then."""
        self._spare += _TRIED
        if self._spare < 1.0 - share:
            return False
        self._spare = 0.0
        return True


class _Plan(NamedTuple):
    """So many texts have drafts of this size. speed: tokens a second."""

    speed: float
    n_texts: int
    size: int


def _speed(plan: _Plan) -> float:
    return plan.speed


def _expected(rate: float, n: int) -> float:
    """How many of n guesses hold, up to the first that doesn't."""
    return float(n) if rate >= 1.0 else rate * (1.0 - rate**n) / (1.0 - rate)


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... and `most`: graphs of the same size are made once. None for 0."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most] if most else []

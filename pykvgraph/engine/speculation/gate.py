"""Whether drafts pay, and how long they should be."""

from __future__ import annotations

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


_SELDOM = 256  # guesses that were refused: then one is tried all the same
_N_TRIED = 4  # its tokens


class Gate:
    """A draft is as long as makes the step say the most tokens a second, by what was measured.

    With n answers, a step says n tokens, and of a draft of k tokens rate + rate^2 + ... + rate^k
    more, where rate is how often a guess holds. It then lasts as long as steps of so many tokens did. A
    draft of no tokens is the best one where acceptance is low or further tokens take long.
    """

    def __init__(self) -> None:
        self.seconds = StepSeconds()
        self._n_refused = 0
        self._n_rows = 0
        self._said = 0.0  # tokens that the step is expected to say
        self._more = 0.0  # seconds, for making drafts
        self.has_refused = False  # in this step

    def begin(self, n_decoding: int, n_rows: int) -> None:
        """The next step, in which so many texts say a token each, and n_rows are decoded without drafts."""
        self._n_rows = n_rows
        self._said = float(n_decoding)
        self._more = 0.0
        self.has_refused = False

    def n_drafted(self, rate: float, most: int, each: float = 0.0) -> int:
        """How many tokens to draft of another text, at most `most`; each: seconds, to make one."""
        if not most:
            return 0
        best, most_a_second = 0, self._said / max(self._lasts(0), 1e-9)
        said = self._said
        power, n = 1.0, 0
        for size in _sizes(most):
            while n < size:
                power *= rate
                said += power
                n += 1
            if (a_second := said / max(self._lasts(size) + size * each, 1e-9)) > most_a_second:
                best, most_a_second = size, a_second
        if not best and not (best := self._tried_seldom(most)):
            self.has_refused = True
            return 0
        self._n_rows += best
        self._said += sum(rate**i for i in range(1, best + 1))
        self._more += best * each
        return best

    def _lasts(self, n: int) -> float:
        return self.seconds.of(self._n_rows + n) + self._more

    def _tried_seldom(self, most: int) -> int:
        self._n_refused += 1
        if self._n_refused < _SELDOM:
            return 0
        self._n_refused = 0
        return min(most, _N_TRIED)


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... and `most`: graphs of the same size are made once."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]

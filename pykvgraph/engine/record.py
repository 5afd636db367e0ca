"""What came of a text's drafts: how many there were, and how often the next token is the one proposed."""

from __future__ import annotations

_KEPT = 0.95  # of what is known, with each token that is compared
_LONGEST_PAUSE = 8
_LONG = (4, 8)  # tokens that were the same: from each of these on, guesses are of another kind


class Record:
    """Drafts of one text. A guess that many tokens speak for holds more often: there is a rate for each kind.

    drafted, accepted: tokens. Guesses that were not decoded count in the rates, too: the token that was said
    instead tells whether they would have held.
    """

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._pause = self._left = 0  # steps
        self._held = [1.0] * (len(_LONG) + 1)
        self._tried = [2.0] * (len(_LONG) + 1)

    def is_due(self) -> bool:
        """Whether to look for a draft in this step: less and less often while nothing comes of it."""
        self._left -= 1
        return self._left < 0

    def found(self, *, something: bool) -> None:
        """Whether what was looked for was there, or held."""
        self._pause = 0 if something else min(self._pause + 1, _LONGEST_PAUSE)
        self._left = self._pause

    def rate(self, n_same: int) -> float:
        """The share of guesses of this kind that hold; a half while nothing is known."""
        kind = _kind(n_same)
        return self._held[kind] / self._tried[kind]

    def learn(self, n_same: int, n: int, n_held: int) -> None:
        """Of n tokens that were guessed so many held, and the next one, if there was one, didn't."""
        kind = _kind(n_same)
        for held in (True,) * n_held + (False,) * (n_held < n):
            self._held[kind] = self._held[kind] * _KEPT + held
            self._tried[kind] = self._tried[kind] * _KEPT + 1


def _kind(n_same: int) -> int:
    return sum(n_same >= least for least in _LONG)

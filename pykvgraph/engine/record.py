"""What came of a text's drafts: how many there were, and how often the next token is the one proposed."""

from __future__ import annotations

_KEPT = 0.95  # of what is known, with each token that is compared
_LONG = (4, 8)  # tokens that were the same: from each of these on, guesses are of another kind


class Record:
    """Drafts of one text. A guess that many tokens speak for holds more often: there is a rate for each kind.

    drafted, accepted: tokens. Guesses that were not decoded count in the rates, too: the token that was said
    instead tells whether they would have held.
    """

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._held = [1.0] * (len(_LONG) + 1)
        self._tried = [2.0] * (len(_LONG) + 1)

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

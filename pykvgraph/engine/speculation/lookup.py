"""N-grams: where the last tokens of a text came before, and what followed them there."""

from __future__ import annotations

from array import array
from typing import NamedTuple

_N_LEAST = 2  # tokens that must be the same
_N_COMPARED = 8  # places of the same last tokens, the newest ones
_LONGEST = 32  # tokens that are compared


class Guess(NamedTuple):
    """Tokens that may follow, and how many of the last ones were the same where they come from."""

    tokens: array[int]
    n_same: int


_NOTHING = Guess(array("i"), 0)


class Lookup:
    """The text so far, by each two tokens in a row. Knows a text that only grows, and no token below 0."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # place behind these two tokens; 0: there is none
        self._before = array("i", [0] * _N_LEAST)  # by place: the one before it, behind the same two
        self._n = 0  # tokens when it was asked last
        self._at = 0  # where what follows was found then
        self._n_same = 0  # 0: nothing was found
        self._last = _NOTHING

    def guess(self, ids: array[int], most: int) -> Guess:
        """What followed the last tokens where the most of them are the same; at most `most` tokens.

        Of places with as many the newest. A place so near that the text ends there goes on with itself.
        """
        n, n_new = len(ids), len(ids) - self._n
        if self._n_same and ids[self._at : self._at + n_new] == ids[self._n :]:
            self._at += n_new  # it went on as it did there, so no other place has more
            self._n_same += n_new
        else:
            self._learn(ids)
            self._at, self._n_same = self._longest(ids)
        self._n = n
        if not self._n_same:
            self._last = _NOTHING
            return _NOTHING
        tokens = ids[self._at : self._at + most]
        while len(tokens) < most:
            tokens += tokens[: most - len(tokens)]
        self._last = Guess(tokens, self._n_same)
        return self._last

    def last_guess(self, n: int) -> Guess:
        """The last one, if the text had n tokens then; else none."""
        return self._last if self._n == n else _NOTHING

    def _learn(self, ids: array[int]) -> None:
        """All but the last place, which is where the text ends now."""
        newest, before = self._newest, self._before
        for at in range(len(before), len(ids)):
            pair = ids[at - 2] << 32 | ids[at - 1]
            before.append(newest.get(pair, 0))
            newest[pair] = at

    def _longest(self, ids: array[int]) -> tuple[int, int]:
        """Where the longest run of last tokens came before, and how long it is."""
        best, most = 0, 0
        n = len(ids)
        at = self._newest.get(ids[-2] << 32 | ids[-1], 0) if n >= _N_LEAST else 0
        for _ in range(_N_COMPARED):
            if not at:
                break
            n_same, limit = _N_LEAST, min(at, _LONGEST)
            while n_same < limit and ids[at - n_same - 1] == ids[n - n_same - 1]:
                n_same += 1
            if n_same > most:
                best, most = at, n_same
            at = self._before[at]
        return best, most

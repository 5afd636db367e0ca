"""How many tokens of prompts a step may decode, so that answers don't wait too long for their next token."""

from __future__ import annotations

from pykvgraph.engine.step_seconds import averaged

_FIRST = 16  # tokens, while nothing is known
_MARGIN = 1.2  # at first: steps differ, and some last so much longer than expected
_RARE = 0.03  # the share of steps that may last longer still
_RATE = 0.1  # of change, for the margin
_USUAL = 0.25  # seconds of a step, where nobody says how many


class TokenBudget:
    """Keeps a step with answers within max_itl seconds (the latency from one token to the next, if it can).

    A step is expected to last base + n * each seconds, for n tokens of prompts; both are averages of the last
    steps, so they follow a prompt whose tokens take longer the longer it gets. 97 of 100 steps should last at
    most margin times that. The margin grows with each step that lasts longer, and shrinks a little with each
    other one; the two balance at that share (Robbins and Monro, A Stochastic Approximation Method, 1951).

    max_itl None: beside answers, prompts get n_beside tokens; fewer, and n_least at least, where
    such a step would last over a quarter of a second.
    """

    def __init__(self, max_itl: float | None, n_beside: int, n_least: int) -> None:
        self._max_itl = max_itl
        self._n_beside = n_beside
        self.n_least = n_least
        self._base = 0.0
        self._each = 0.0
        self._margin = _MARGIN

    def least(self, most: int) -> int:
        """What n_prompt_tokens() never falls below."""
        return min(self.n_least, most) if self._max_itl is None else 1

    def n_prompt_tokens(self, n_decoding: int, most: int) -> int:
        """For the next step, in which n_decoding texts say a token each; at least 1."""
        if not n_decoding:
            return most
        if self._max_itl is not None:
            return max(1, min(self._room(self._max_itl), most)) if self._each else min(_FIRST, most)
        room = self._room(_USUAL) if self._each else self._n_beside
        return min(max(min(room, self._n_beside), self.n_least), most)

    def _room(self, seconds: float) -> int:
        """Tokens of prompts of a step that lasts so long."""
        return int((seconds / self._margin - self._base) / self._each)

    def learn(self, n_decoding: int, n_prompt_tokens: int, seconds: float) -> None:
        """What a step took."""
        if not n_decoding:
            return
        if not n_prompt_tokens:
            self._base = averaged(self._base, seconds)
            return
        if self._each:
            was_late = seconds > self._margin * (self._base + n_prompt_tokens * self._each)
            self._margin = max(self._margin + _RATE * (was_late - _RARE), 1.0)
        self._each = averaged(self._each, max(seconds - self._base, 0.0) / n_prompt_tokens)

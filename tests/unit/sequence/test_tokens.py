"""Tokens against a list of ids and positions. Hypothesis chooses what is done."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import chance

from pykvgraph.checks import INT32_MAX
from pykvgraph.sequence.tokens import DecodedTokens, Tokens

SHARE = st.floats(0, 1)  # of what there is to choose among


class PairsOfLists(RuleBasedStateMachine):
    """pairs: of all tokens, as they are in the cache or will be. n_true: INT32_MAX: they are all true."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = DecodedTokens()
        self.pairs: list[tuple[int, int]] = []
        self.n_true = INT32_MAX
        self.kept = DecodedTokens(), list(self.pairs)  # a copy, and what it must have for ever

    @property
    def firsts(self) -> list[int]:
        """The tokens that are the first on their positions."""
        at = [position for _, position in self.pairs]
        return [n for n in range(len(at)) if n == 0 or at[n] != at[n - 1]]

    @rule(ids=st.lists(st.integers(0, 99), max_size=12))
    def extend(self, ids: list[int]) -> None:
        begin = self.pairs[-1][1] + 1 if self.pairs else 0
        self.tokens.extend(ids)
        self.pairs += [(token, begin + n) for n, token in enumerate(ids)]

    @rule(share=SHARE)
    def cut(self, share: float) -> None:
        n = [*self.firsts, len(self.pairs)][round(share * len(self.firsts))]
        self.tokens.cut(n)
        del self.pairs[n:]
        if n <= self.n_true:
            self.n_true = INT32_MAX

    @precondition(lambda self: len(self.firsts) > 1)
    @rule(one=SHARE, other=SHARE)
    def discard(self, one: float, other: float) -> None:
        firsts = self.firsts
        begin, end = sorted(firsts[round(share * (len(firsts) - 1))] for share in (one, other))
        if begin < end:
            gone = self.pairs[end][1] - self.pairs[begin][1]
            self.tokens.discard(begin, end)
            self.pairs[begin:] = [(token, at - gone) for token, at in self.pairs[end:]]
            self.n_true = min(self.n_true, begin)

    @rule(one=SHARE, other=SHARE, n_grp=st.integers(2, 5))
    def group(self, one: float, other: float, n_grp: int) -> None:
        grouped = [n for n in range(len(self.pairs)) if n not in self.firsts]
        free = range(grouped[-1] + 1 if grouped else 0, len(self.pairs) + 1)
        begin, end = (
            sorted(free[round(share * (len(free) - 1))] for share in (one, other)) if free else (0, 0)
        )
        if begin < end:
            self.tokens.group(begin, end, n_grp)
            p0 = self.pairs[begin][1]
            lost = end - begin - -(-(end - begin) // n_grp)
            for n in range(begin, len(self.pairs)):
                token, at = self.pairs[n]
                self.pairs[n] = token, p0 + (n - begin) // n_grp if n < end else at - lost
            self.n_true = min(self.n_true, begin)

    @rule()
    def copy(self) -> None:
        self.kept = self.tokens.copy(), list(self.pairs)
        assert self.kept[0].n_true == self.n_true

    @rule()
    def begin(self) -> None:
        self.tokens.begin(len(self.pairs))
        self.n_true = INT32_MAX

    @invariant()
    def is_as_the_list(self) -> None:
        for tokens, pairs in ((self.tokens, self.pairs), self.kept):
            assert list(tokens.ids) == [token for token, _ in pairs]
            assert [tokens.positions.of(n) for n in range(len(pairs))] == [at for _, at in pairs]
            assert tokens.next_position == (pairs[-1][1] + 1 if pairs else 0)
            assert (tokens.n_decoded, tokens.n_todo) == (len(pairs), 0)
        assert self.tokens.n_true == self.n_true
        assert self.tokens.has_shifted == (self.n_true < INT32_MAX)
        assert self.tokens.n_shareable == min(self.n_true, len(self.pairs))


def test_against_a_list() -> None:
    run_state_machine_as_test(
        PairsOfLists, settings=settings(max_examples=2000 // chance.SHARE, stateful_step_count=30)
    )


def test_what_is_not_decoded_yet() -> None:
    """An engine's text: the prompt is known before it is decoded; a window gives up decoded tokens alone."""
    tokens = Tokens(range(10, 20))
    tokens.begin(4)
    assert (tokens.n_decoded, tokens.n_todo) == (4, 6)
    tokens.n_decoded += 3
    tokens.discard(1, 5)
    assert list(tokens.ids) == [10, 15, 16, 17, 18, 19]
    assert (tokens.n_decoded, tokens.n_todo, tokens.n_shareable) == (3, 3, 1)

"""Positions of a text of which some tokens share one, beside a list of all of them."""

from __future__ import annotations

import random

from support import chance

from pykvgraph.sequence.tokens import Positions


def all_of(positions: Positions, n: int) -> list[int]:
    return [positions.of(i) for i in range(n)]


def test_groups_and_removals_at_random() -> None:
    """The naive way: a list of every token's position."""
    rng = random.Random(chance.seed(1))
    for _ in range(200):
        n = rng.randrange(20, 60)
        positions, naive = Positions(), list(range(n))
        for _ in range(4):
            first = len(positions.head)
            if first < n - 1 and rng.random() < 0.6:
                begin = rng.randrange(first, n - 1)
                end, n_grp = rng.randrange(begin + 1, n), rng.randrange(2, 5)
                positions = positions.grouped(begin, end, n_grp)
                n_positions = -(-(end - begin) // n_grp)
                lost = end - begin - n_positions
                naive = [
                    p if i < begin else naive[begin] + (i - begin) // n_grp if i < end else p - lost
                    for i, p in enumerate(naive)
                ]
            else:
                starts = [i for i in range(n) if i == 0 or naive[i] != naive[i - 1]]
                begin, end = sorted(rng.sample(starts, 2))
                positions = positions.removed(begin, end)
                gone = naive[end] - naive[begin]
                naive = naive[:begin] + [p - gone for p in naive[end:]]
                n = len(naive)
            assert all_of(positions, n) == naive
            assert positions.of(n) == naive[-1] + 1
            for p in naive:
                assert positions.first_at(p) == naive.index(p)
            if n < 5:
                break

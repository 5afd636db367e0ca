"""Where a token of a long text comes to stand, against a list that is worked on one token at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.sequence.long_reader import extended


def grouped_by_hand(n: int, p0: int, p1: int, n_grp: int) -> list[int]:
    """Tokens at 0..n-1: in [p0, p1) a new position begins with every n_grp-th token, and again after p1."""
    positions: list[int] = []
    in_group = 0
    for i in range(n):
        if i < p0:
            positions.append(i)
        elif i == p0 or i >= p1 or in_group == n_grp:
            positions.append(positions[-1] + 1 if positions else 0)
            in_group = 1
        else:
            positions.append(positions[-1])
            in_group += 1
    return positions


@given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 40), st.integers(1, 9))
def test_extended_is_counting_in_groups(n: int, p0: int, length: int, n_grp: int) -> None:
    positions = extended(np.arange(n, dtype=np.int64), p0, p0 + length, n_grp)
    if n < p0 + length:  # a text that ends inside: only what is there counts
        length = max(n - p0, 0)
    assert positions.tolist() == grouped_by_hand(n, p0, p0 + length, n_grp)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 9))
def test_what_comes_later_keeps_its_distance_from_the_end(
    p0: int, length: int, n_grp: int, ahead: int
) -> None:
    """A token that is not decoded yet moves with the end of the text."""
    n = p0 + length
    positions = extended(np.arange(n + ahead + 1, dtype=np.int64), p0, n, n_grp)
    assert positions[n + ahead] - positions[n - 1] == ahead + 1

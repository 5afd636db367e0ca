from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.sampling.sampler import likeliest

ROWS = st.lists(st.integers(-5, 5).map(float) | st.just(-np.inf), min_size=1, max_size=40)


@given(ROWS, st.integers(0, 50))
def test_they_are_the_highest_in_order(row: list[float], n: int) -> None:
    found = likeliest(np.array(row, np.float32), n)
    assert [value for _, value in found] == sorted(row, reverse=True)[:n]
    assert all(row[token] == value for token, value in found)
    assert len({token for token, _ in found}) == len(found)


def test_of_equals_the_highest_id_comes_first() -> None:
    assert likeliest(np.array([1.0, 3.0, 1.0, 3.0]), 4) == [(3, 3.0), (1, 3.0), (2, 1.0), (0, 1.0)]


def test_none_are_asked_for() -> None:
    assert likeliest(np.empty(0, np.float32), 0) == likeliest(np.ones(3), 0) == []


@given(st.integers(0, 400), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_of_many_tokens_too(n_more: int, n: int, seed: int) -> None:
    """Ties everywhere; the highest anywhere, behind the last whole run too."""
    row = np.random.default_rng(seed).integers(-3, 3, 4096 + n_more).astype(np.float32)
    row[np.random.default_rng(seed).integers(0, len(row), n // 2)] += 5
    found = likeliest(row, n)
    assert [value for _, value in found] == np.sort(row)[::-1][:n].tolist()
    assert len({token for token, _ in found}) == n and all(row[token] == value for token, value in found)

"""DéjàVu's planner, beside a search over all splits."""

from __future__ import annotations

import random

import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.stream import split_workers


def requests_a_second(n_prefill: int, n_decode: int, prompt: float, answer: float) -> float:
    return min(n_prefill / prompt, n_decode / answer)


def test_of_the_formula() -> None:
    """By hand: 8 workers, prompts of 1 s, answers of 3 s: 8 * 3 / 4 = 6 decode."""
    assert split_workers(8, 1.0, 0.03, 100) == (2, 6)
    assert split_workers(8, 1.0, 0.03, 100, overhead=1.5) == (2, 6)  # 5.33
    assert split_workers(10, 2.0, 0.01, 100) == (6, 4)  # 3.33


def test_no_split_is_better_by_more_than_a_worker() -> None:
    """Rounding up may give away what one worker of prompts does, never more."""
    rng = random.Random(0)
    for _ in range(500):
        n, prompt, token = rng.randrange(2, 64), rng.uniform(0.01, 20), rng.uniform(0.001, 0.2)
        n_tokens, overhead = rng.randrange(1, 2000), rng.uniform(1, 2)
        roles = split_workers(n, prompt, token, n_tokens, overhead)
        assert roles.prefill + roles.decode == n and min(roles) >= 1
        own = requests_a_second(*roles, prompt * overhead, n_tokens * token)
        best = max(
            requests_a_second(n - decode, decode, prompt * overhead, n_tokens * token)
            for decode in range(1, n)
        )
        one_less = requests_a_second(roles.prefill + 1, roles.decode - 1, prompt * overhead, n_tokens * token)
        assert best <= max(own, one_less) + 1e-12


@pytest.mark.parametrize(
    "arguments", [(1, 1, 1, 1), (2, 0, 1, 1), (2, 1, -1, 1), (2, 1, 1, 0), (2, 1, 1, 1, 0.5), ("2", 1, 1, 1)]
)
def test_what_cannot_be(arguments: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        split_workers(*arguments)  # type: ignore[arg-type]

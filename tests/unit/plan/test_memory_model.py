"""MemoryModel and TGIS's formulas: numbers worked out by hand, and curves that are known."""

from __future__ import annotations

import numpy as np
import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.plan.memory_model import (
    MemoryModel,
    NextTokenSample,
    PrefillSample,
    speculation_limit,
    weight_limit,
)

MODEL = MemoryModel(prompt_line=2000, prompt=1000, prompt_square=10, n_in=100, n_out=200)


def test_prefill() -> None:
    # 3 prompts of 50: 2000 * 150 = 300,000; 1000 * 150 + 10 * 3 * 2,500 = 225,000
    assert MODEL.prefill(3, 50) == 300_000
    # 3 prompts of 200: 2000 * 600 = 1,200,000; 1000 * 600 + 10 * 3 * 40,000 = 1,800,000
    assert MODEL.prefill(3, 200) == 1_800_000
    # 100 * 10 = 1,000 is where both are the same: 2000 * 100 = 1000 * 100 + 10 * 10,000
    assert MODEL.prefill(1, 100) == 200_000


def test_next_token() -> None:
    assert MODEL.next_token(30, 5) == 4_000  # 100 * 30 + 200 * 5


@pytest.mark.parametrize(
    ("free", "margin", "limit"),
    [
        (1000, 20, 800),
        (1_000_001, 20, 800_000),  # 800,000.8
        (999, 0, 999),
        (7, 99, 0),  # 0.07
        (10**18 + 9, 10, 9 * 10**17 + 8),  # floats can't tell these apart
    ],
)
def test_weight_limit(free: int, margin: int, limit: int) -> None:
    assert weight_limit(free, margin) == limit


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (100, 75),
        (101, 75),
        (3, 2),
        (4 * 10**18 + 4, 3 * 10**18 + 3),
        (0, 0),
    ],  # floats can't tell the long ones apart
)
def test_speculation(limit: int, most: int) -> None:
    """Three quarters, exactly."""
    assert speculation_limit(limit) == most


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("square", [0.0, 5.0])
def test_known_curves(square: float, noise: float) -> None:
    """Coefficients within 2 %, and the prompt with which memory ends within 10 tokens."""
    rng = np.random.default_rng(3)

    def measured(n_bytes: float) -> int:
        return round(n_bytes * (1 + noise * rng.standard_normal()))

    samples: list[PrefillSample | NextTokenSample] = []
    for b in (1, 2, 3, 4):
        for s in range(50, 2050, 20):
            samples.append(PrefillSample(b, s, measured(b * (5000 * s + square * s**2))))
            samples.append(NextTokenSample(b, s, s // 3, measured(b * (300 * s + 400 * (s // 3)))))
            samples.append(NextTokenSample(b, s, 900, measured(b * (300 * s + 400 * 900))))
    found = MemoryModel.fit(samples)
    assert found.n_in == pytest.approx(300, rel=0.02)
    assert found.n_out == pytest.approx(400, rel=0.02)
    assert found.prompt == pytest.approx(5000, rel=0.02)
    assert found.prompt_square == pytest.approx(square, rel=0.02, abs=0.1)
    limit = 5000 * 1900 + square * 1900**2
    assert found.prefill(1, 1890) < limit < found.prefill(1, 1910)
    if not square:
        assert found.prompt_line == pytest.approx(5000, rel=0.02)


def test_samples_of_both_kinds() -> None:
    with pytest.raises(InvalidArgumentError, match="PrefillSample"):
        MemoryModel.fit([NextTokenSample(1, 1, 1, 1)])
    with pytest.raises(InvalidArgumentError, match="above 0"):
        MemoryModel.fit([NextTokenSample(1, 1, 1, 1), PrefillSample(1, 1, 0)])

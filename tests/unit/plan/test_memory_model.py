"""MemoryModel and TGIS's formulas: numbers worked out by hand, and curves that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.plan.memory_model import (
    MemoryModel,
    NextTokenSample,
    PrefillSample,
    allows_speculation,
    recommended_margin,
    weight_limit,
)

MODEL = MemoryModel(prompt_line=2000, prompt=1000, prompt_square=10, n_in=100, n_out=200)
ZERO = MemoryModel(0, 0, 0, 0, 0)


def test_prefill() -> None:
    # 3 prompts of 50: 2000 * 150 = 300,000; 1000 * 150 + 10 * 3 * 2,500 = 225,000
    assert MODEL.prefill(3, 50) == 300_000
    # 3 prompts of 200: 2000 * 600 = 1,200,000; 1000 * 600 + 10 * 3 * 40,000 = 1,800,000
    assert MODEL.prefill(3, 200) == 1_800_000
    # 100 * 10 = 1,000 is where both are the same: 2000 * 100 = 1000 * 100 + 10 * 10,000
    assert MODEL.prefill(1, 100) == 200_000


def test_next_token() -> None:
    assert MODEL.next_token(30, 5) == 4_000  # 100 * 30 + 200 * 5
    assert MODEL.coefficients == (2000, 1000, 10, 100, 200)


def test_the_longest_prompt() -> None:
    # 1,800,000 for 3 texts: 600,000 each. The line: 300. 10 S² + 1000 S = 600,000: (-100 + 500) / 2 = 200
    assert MODEL.longest_prompt(1_800_000, 3) == 200
    # 100,000: the line 50; the curve (-100 + sqrt(10,000 + 40,000)) / 2 = 61.8
    assert MODEL.longest_prompt(100_000) == 50
    assert MemoryModel(0, 500, 0, 1, 1).longest_prompt(10_000) == 20
    assert ZERO.longest_prompt(1) == math.inf


def test_blocks() -> None:
    # a block of 32 cells takes 200 * 32 = 6,400; 800,000 / 6,400 = 125
    assert MODEL.n_blocks(800_000) == 125
    assert MODEL.n_blocks(799_999) == 124
    assert MODEL.n_blocks(800_000, 16) == 250
    assert ZERO.n_blocks(1) == math.inf


def test_ratio() -> None:
    assert MODEL.ratio == 10  # 2000 / 200
    assert ZERO.ratio == 0


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
    ("next_token", "prefill", "margin"),
    [
        (0.25, 0.0, 30),  # 1 - 0.75 / 1 = 0.25: 5 + 25
        (0.2, 0.0, 25),  # 1 - 0.8 = 0.2: 5 + 20
        (0.5, 0.2, 42),  # 1 - 0.5 / 0.8 = 0.375: 5 + 37
        (0.3, 0.1, 27),  # 1 - 0.7 / 0.9 = 0.222: 5 + 22
        (0.2, -0.25, 41),  # a prompt takes more than there is: 1 - 0.8 / 1.25 = 0.36
        (0.2, 0.2, 0),
        (0.2, 0.5, 0),  # prompts take less than the cache
        (1.0, 1.0, 0),  # nothing takes anything
    ],
)
def test_recommended_margin(next_token: float, prefill: float, margin: int) -> None:
    assert recommended_margin(next_token, prefill) == margin


@pytest.mark.parametrize(
    ("batch", "limit", "allowed"),
    [
        (75, 100, True),
        (76, 100, False),
        (3 * 10**18, 4 * 10**18, True),
        (3 * 10**18 + 1, 4 * 10**18, False),
        (0, 0, True),
        (1, 0, False),
    ],
)
def test_speculation(batch: int, limit: int, allowed: bool) -> None:
    """Up to three quarters, exactly."""
    assert allows_speculation(batch, limit) == allowed


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
    assert abs(found.longest_prompt(round(limit)) - 1900) <= 10
    if not square:
        assert found.prompt_line == pytest.approx(5000, rel=0.02)


def test_samples_of_both_kinds() -> None:
    with pytest.raises(InvalidArgumentError, match="PrefillSample"):
        MemoryModel.fit([NextTokenSample(1, 1, 1, 1)])
    with pytest.raises(InvalidArgumentError, match="above 0"):
        MemoryModel.fit([NextTokenSample(1, 1, 1, 1), PrefillSample(1, 1, 0)])

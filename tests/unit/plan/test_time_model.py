"""TimeModel: lines that are known, and coefficients that are never negative."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.plan.least_squares import non_negative
from pykvgraph.plan.time_model import StepSample, TimeModel, cells_of_run

FEW = (0.010, 0.002, 1e-6)
MANY = (0.020, 0.001, 1e-7)


def true_seconds(n: int, cells: int) -> float:
    step, token, cell = FEW if n <= 8 else MANY
    return step + token * n + cell * cells


def samples(noise: float = 0.0) -> list[StepSample]:
    rng = np.random.default_rng(5)
    shapes = itertools.product((1, 2, 4, 8, 16, 32, 64, 128), (0, 500, 1000, 2000, 4000), range(60))
    return [
        StepSample(n, cells, true_seconds(n, cells) * (1 + noise * rng.standard_normal()))
        for n, depth, _ in shapes
        for cells in [cells_of_run(depth, n)]
    ]


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-6), (0.02, 0.02)])
def test_known_lines(noise: float, within: float) -> None:
    found = TimeModel.fit(samples(noise))
    assert found.coefficients == pytest.approx((*FEW, *MANY), rel=within)


def test_cells_of_a_run() -> None:
    """Each token attends to those before it and itself."""
    assert cells_of_run(0, 4) == 1 + 2 + 3 + 4
    assert cells_of_run(10, 3) == 11 + 12 + 13


def test_prompts_and_answers() -> None:
    model = TimeModel.fit(samples())
    whole = sum(true_seconds(n, cells_of_run(first, n)) for first, n in ((0, 512), (512, 512), (1024, 76)))
    assert model.prefill(1, 1100) == pytest.approx(whole)
    assert model.prefill(3, 1100) == pytest.approx(3 * whole)
    assert model.next_token(100, 20) == pytest.approx(true_seconds(1, 121))


def test_no_coefficient_is_negative() -> None:
    """The best of a fine grid of such coefficients is no better."""
    rows = [(1.0, 1.0, 3.0), (1.0, 2.0, 1.0), (1.0, 3.0, 0.5), (1.0, 4.0, 2.0)]
    values = [4.0, 3.0, 2.0, 1.0]  # falls with the second column

    def error(coefficients: tuple[float, ...]) -> float:
        return float(np.sum((np.array(rows) @ coefficients / values - 1) ** 2))

    found = non_negative(rows, values)
    assert min(found) >= 0
    grid = np.linspace(0, 3, 61)
    assert error(found) <= min(error(each) for each in itertools.product(grid, grid, grid)) + 1e-9


def test_a_column_of_zeros() -> None:
    assert non_negative([(1, 0), (1, 0)], [2.0, 2.0]) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none(seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="above 0"):
        TimeModel.fit([StepSample(1, 1, seconds), StepSample(32, 1, 1.0)])


def test_both_sizes_are_needed() -> None:
    with pytest.raises(InvalidArgumentError, match="some more"):
        TimeModel.fit([StepSample(1, 1, 1.0)])

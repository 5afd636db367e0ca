from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph import checks
from pykvgraph.errors import InvalidArgumentError

NO_INTEGERS = [
    1.0,
    1.5,
    "1",
    b"1",
    None,
    True,
    False,
    np.bool_(True),
    np.float32(1),
    [1],
    np.array([1, 2]),
    1j,
]


@given(st.integers())
def test_integer_is_itself_or_an_error(value: int) -> None:
    if -(2**63) <= value < 2**63:
        assert checks.integer(value, "n") == value
    else:
        with pytest.raises(InvalidArgumentError, match=r"^n must be "):
            checks.integer(value, "n")


@pytest.mark.parametrize("value", [np.int8(5), np.uint64(5), np.int64(5), np.array(5)])
def test_numpy_integers_are_integers(value: Any) -> None:
    result = checks.integer(value, "n")
    assert result == 5
    assert type(result) is int


@pytest.mark.parametrize("value", NO_INTEGERS)
def test_no_integer_is_named(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="^n must be an integer, got .*" + type(value).__name__):
        checks.integer(value, "n")


def test_range_is_inclusive() -> None:
    assert checks.integer(3, "n", 3, 5) == 3
    assert checks.integer(5, "n", 3, 5) == 5
    for value in (2, 6):
        with pytest.raises(InvalidArgumentError, match=f"^n must be from 3 to 5, got {value}$"):
            checks.integer(value, "n", 3, 5)
    with pytest.raises(InvalidArgumentError, match=r"^n must be 3 or more, got 2$"):
        checks.integer(2, "n", 3)


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["above", "below"])
def test_integers_that_python_will_not_print(value: int) -> None:
    with pytest.raises(InvalidArgumentError, match="16610 bits"):
        checks.integer(value, "n")
    with pytest.raises(InvalidArgumentError, match="must be an integer"):
        checks.integer([value], "n")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"ids\[1\]"):
        checks.integers([1, value], "ids")
    with pytest.raises(InvalidArgumentError, match="bits"):
        checks.real(value, "x", -1e30, 1e30)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), np.int64(1)])
def test_real(value: Any) -> None:
    assert checks.real(value, "x", 0, 1) == float(value)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -0.1, 1.1, "0.5", None, True, np.bool_(True), 1j]
)
def test_no_real(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^x must be"):
        checks.real(value, "x", 0, 1)


def test_flag() -> None:
    assert checks.flag(True, "f") is True
    assert checks.flag(np.bool_(False), "f") is False  # type: ignore[arg-type]
    for value in (0, 1, None, "yes"):
        with pytest.raises(InvalidArgumentError, match=r"^f must be True or False"):
            checks.flag(value, "f")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.uint8), np.array([1, 2, 3], np.uint64)],
)
def test_integers(values: Any) -> None:
    array = checks.integers(values, "ids")
    assert array.dtype == np.int32
    assert array.tolist() == [1, 2, 3]


def test_integers_are_a_copy() -> None:
    source = np.array([1, 2, 3], np.int32)
    array = checks.integers(source, "ids")
    source[0] = 9
    assert array.tolist() == [1, 2, 3]


def test_no_integers_at_all() -> None:
    assert checks.integers([], "ids").shape == (0,)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1, 2**31], r"ids\[1\] must be from -2147483648 to 2147483647, got 2147483648"),
        ([-(2**31) - 1], r"ids\[0\]"),
        ([1, 2**63], r"ids\[1\] must be from .* got 9223372036854775808"),
        ([1, 2**64], r"ids\[1\]"),
        (np.array([2**64 - 1], np.uint64), r"ids\[0\]"),
        ([1, 2.0], r"ids\[1\] must be an integer, got 2.0"),
        (np.array([1.0, 2.0]), r"ids\[0\] must be an integer"),
        ([True, False], r"ids\[0\] must be an integer, got True"),
        (["1"], r"ids\[0\] must be an integer, got '1'"),
        ([None], r"ids\[0\] must be an integer, got None"),
        ([[1], [2]], r"flat list of integers, got shape \(2, 1\)"),
        ([[1], [2, 3]], "flat list of integers"),
        (5, r"flat list of integers, got shape \(\)"),
        ("123", "got text"),
        (b"123", "got text"),
    ],
)
def test_bad_integers_are_told(values: Any, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        checks.integers(values, "ids")

"""Checks of arguments, done before any native call, and how values are told to people.

ctypes truncates integers that are too large.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import InvalidArgumentError

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# several integers, as a call accepts them
Integers = Sequence[int] | npt.NDArray[np.integer[Any]]


def shown(value: object) -> str:
    """A short text of `value` for a message."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # a container holds an integer with so many digits that Python refuses to print it
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer(value: SupportsIndex, name: str, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    """`value` as a Python int within [low, high]. A bool, a float or a string is not accepted.

    Raises InvalidArgumentError, which names the argument.
    """
    try:
        if isinstance(value, (bool, np.bool_)):  # operator.index() accepts NumPy's bool before NumPy 2
            raise TypeError
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise InvalidArgumentError(f"{name} must be an integer, got {shown(value)} ({kind})") from None
    if not low <= number <= high:
        allowed = f"{low} or more" if high == INT64_MAX and number < low else f"from {low} to {high}"
        raise InvalidArgumentError(f"{name} must be {allowed}, got {shown(number)}")
    return number


def real(value: float, name: str, low: float, high: float) -> float:
    """`value` as a float within [low, high]. NaN, a bool or a string is not accepted.

    Raises InvalidArgumentError, which names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgumentError(f"{name} must be a number, got {shown(value)} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:  # an integer that is too large for a float
        number = math.inf if value > 0 else -math.inf
    if not low <= number <= high:
        raise InvalidArgumentError(f"{name} must be from {low:g} to {high:g}, got {shown(value)}")
    return number


def flag(value: bool, name: str) -> bool:
    """`value` if it is a bool. Raises InvalidArgumentError, which names the argument."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def strings(values: str | Iterable[str], name: str) -> tuple[str, ...]:
    """`values` as a tuple of non-empty strings; a single string becomes a tuple of one.

    Raises InvalidArgumentError, which names the argument.
    """
    items = None if isinstance(values, str) else several(values)
    texts: tuple[Any, ...] = (values,) if items is None else tuple(items)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(f"{name} must be non-empty strings, got {shown(text)}")
    return texts


def several(values: object) -> list[Any] | None:
    """The items of `values`; None when it can't have items: a number, or a NumPy array without dimensions."""
    if not isinstance(values, Iterable) or (isinstance(values, np.ndarray) and values.ndim == 0):
        return None
    return list(values)


def indices(value: range, name: str, n: int = INT64_MAX) -> range:
    """`value` as a range of neighbours among `n` things.

    Raises InvalidArgumentError, which names the argument.
    """
    if not isinstance(value, range) or value.step != 1:
        raise InvalidArgumentError(f"{name} must be a range without a step, got {shown(value)}")
    begin = integer(value.start, f"the start of {name}", 0, n)
    return range(begin, integer(value.stop, f"the end of {name}", begin, n))


def integers(
    values: Integers, name: str, low: int = INT32_MIN, high: int = INT32_MAX
) -> npt.NDArray[np.int32]:
    """`values` as an int32 array (n,), each within [low, high].

    Raises InvalidArgumentError, which names the argument and the first wrong value.
    """
    if isinstance(values, (str, bytes)):
        raise InvalidArgumentError(f"{name} must be integers, got text: encode it with model.tokenizer first")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidArgumentError(f"{name} must be a flat list of integers: {error}") from error
    if array.ndim != 1:
        raise InvalidArgumentError(f"{name} must be a flat list of integers, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        # a value is not an integer, or so large that NumPy did not make an integer array
        return np.array(
            [integer(value, f"{name}[{i}]", low, high) for i, value in enumerate(values)], np.int32
        )
    wrong = (array < low) | (array > high)
    if wrong.any():
        index = int(wrong.argmax())
        integer(array[index], f"{name}[{index}]", low, high)
    return array.astype(np.int32)


def integer_rows(
    values: object, name: str, columns: Sequence[str], high: int = INT32_MAX
) -> list[tuple[int, ...]]:
    """`values` as tuples with an integer of each column, within [0, high].

    Raises InvalidArgumentError, which names the argument.
    """
    items = several(values)
    rows = [several(item) or [] for item in items or ()]
    if items is None or any(len(row) != len(columns) for row in rows):
        raise InvalidArgumentError(f"{name} must be several of ({', '.join(columns)}), got {shown(values)}")
    return [
        tuple(
            integer(value, f"{name}: {column}", 0, high) for value, column in zip(row, columns, strict=True)
        )
        for row in rows
    ]


def native_path(path: str | os.PathLike[str]) -> bytes:
    """A path as bytes, for C. Raises InvalidArgumentError unless it is a str or Path without NUL."""
    try:
        name = os.fsencode(path)
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidArgumentError(f"the path must be a str or a Path: {error}") from error
    if b"\0" in name:
        raise InvalidArgumentError(f"the path holds a NUL character: {name!r}")
    return name


def instance(value: object, wanted: type[Any], name: str) -> None:
    """Raises InvalidArgumentError, which names the argument, for a value that is none of this class."""
    if not isinstance(value, wanted):
        raise InvalidArgumentError(f"{name} must be a pykvgraph.{wanted.__name__}, got {shown(value)}")


def size_text(n_bytes: int) -> str:
    """Bytes for people: `1.1 MiB`."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    power = min((n_bytes.bit_length() - 1) // 10, 4)
    return f"{n_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def parameters_text(n_params: int) -> str:
    """A number of parameters for people: `0.3 M parameters`, `8.0 B parameters`."""
    if n_params < 1_000_000_000:
        return f"{n_params / 1e6:.1f} M parameters"
    return f"{n_params / 1e9:.1f} B parameters"


def text_bytes(value: object, name: str) -> bytes:
    """Bytes, or a str in UTF-8. Raises InvalidArgumentError for anything else."""
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, bytes):
        return value
    raise InvalidArgumentError(f"{name} must be a str or bytes, got {shown(value)}")

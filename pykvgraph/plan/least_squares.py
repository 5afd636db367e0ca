"""Least squares whose coefficients are never negative."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pykvgraph.errors import InvalidArgumentError

MOST_COLUMNS = 6  # all 2^n choices of them are tried


def non_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients >= 0, one for each column, with the least sum of squared relative errors.

    rows: (n_samples, n_columns). values: what rows · coefficients should be; a value off by 1 % counts as
    much as any other, as measured values are off by about the same part of them. The solution is the ordinary
    one of the columns that it uses (Lawson and Hanson, Solving Least Squares Problems, 1974); so each choice
    of columns is solved, and of those without a negative coefficient the best is taken. A column of zeros
    gets 0. Raises InvalidArgumentError for more than 6 columns and for values that are not above 0.
    """
    wanted = np.array(values, np.float64)
    if not len(wanted) or not (wanted > 0).all() or not np.isfinite(wanted).all():
        raise InvalidArgumentError("samples: there must be some, and what was measured must be above 0")
    matrix = np.array(rows, np.float64) / wanted[:, None]
    n_columns = matrix.shape[1]
    if n_columns > MOST_COLUMNS:
        raise InvalidArgumentError(f"{n_columns} coefficients, and there may be {MOST_COLUMNS}")
    scale = np.abs(matrix).max(axis=0)
    used = [i for i in range(n_columns) if scale[i] > 0]
    best, least = np.zeros(n_columns), float(len(wanted))
    for n in range(1, len(used) + 1):
        for chosen in map(list, itertools.combinations(used, n)):
            part = matrix[:, chosen] / scale[chosen]
            found = np.linalg.lstsq(part, np.ones(len(wanted)), rcond=None)[0]
            error = float(np.sum((part @ found - 1) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(n_columns), error
                best[chosen] = found / scale[chosen]
    return tuple(map(float, best))

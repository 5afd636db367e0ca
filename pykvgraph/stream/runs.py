"""Cells that are neighbours: their rows are one piece of memory in each of K and V of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import StateError


def runs_of(cells: npt.NDArray[np.int32]) -> list[int]:
    """How many cells each run has, in this order of cells."""
    begins = np.flatnonzero(np.diff(cells) != 1) + 1
    return np.diff([0, *begins.tolist(), len(cells)]).tolist() if len(cells) else []


def pack_runs(groups: Sequence[Sequence[int]]) -> bytes:
    """The lengths of the runs of each group, in front of a table."""
    return b"".join(np.array([len(runs), *runs], "<u4").tobytes() for runs in groups)


def take_runs(table: memoryview, n_groups: int) -> tuple[list[list[int]], memoryview]:
    """What pack_runs gave, and what follows it. Raises StateError."""
    groups: list[list[int]] = []
    for _ in range(n_groups):
        n = int.from_bytes(table[:4], "little")
        if n > len(table) // 4 - 1:
            raise StateError("the stream's table is too short for its runs")
        groups.append(np.frombuffer(table, "<u4", n, 4).tolist())
        table = table[4 + 4 * n :]
    return groups, table


def check_runs(runs: Sequence[int], n_cells: int) -> None:
    """Raises StateError unless these are the runs of so many cells."""
    if sum(runs) != n_cells or 0 in runs:
        raise StateError(f"the stream's table has runs of {sum(runs)} cells in all for {n_cells}")

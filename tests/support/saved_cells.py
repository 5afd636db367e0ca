"""Saved states of cells that never were in a cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pykvgraph.kv_cache.saved import format as kv_state
from pykvgraph.kv_cache.saved.cells import SavedCells, SavedState
from pykvgraph.kv_cache.saved.geometry import Geometry, GroupGeometry

NARROW = GroupGeometry(0, 0, (0, 1), 4, 8, 16, 1, 0, cell_bytes=2 * 4 * (8 * 2 + 16 * 4))
WIDE = GroupGeometry(0, 0, (2,), 3, 10, 6, 1, 0, cell_bytes=3 * (10 * 2 + 6 * 4))
HERE = Geometry(bytes(range(16)), (NARROW,))
WINDOW = GroupGeometry(1, 32, (2,), 3, 10, 6, 1, 0, cell_bytes=3 * (10 * 2 + 6 * 4))
WITH_WINDOW_HERE = Geometry(bytes(range(16)), (NARROW, WINDOW))
TWO_GROUPS_HERE = Geometry(bytes(range(16)), (NARROW, WIDE))


def saved(
    n_cells: int = 7, n_seq: int = 11, whole: bool = True, seed: int = 0, geometry: Geometry = HERE
) -> SavedState:
    """Cells in order of position, each of one to three sequences; alike in all groups, but for dither."""
    rng = np.random.default_rng(seed)
    seq = np.zeros((n_cells, n_seq), np.bool_)
    for row in seq:
        row[rng.choice(n_seq, min(n_seq, 1 + int(rng.integers(3))), replace=False)] = True
    pos = np.sort(rng.integers(0, 2**31, n_cells)).astype(np.int32)
    groups = []
    for group in geometry.groups:
        rows = rng.integers(0, 256, n_cells * group.cell_bytes).astype(np.uint8)
        rows &= 0xBF  # no exponent is all ones
        dither = rng.integers(0, 256, n_cells).astype(np.uint8)
        lost = np.full(n_seq, -1, np.int32)
        if group.kind and n_cells:
            lost[seq[0]] = pos[0] - 1  # the lowest position
        groups.append(SavedCells(pos, seq, dither, rows, lost, np.zeros_like(seq)))
    return SavedState(whole, tuple(groups))


def packed(geometry: Geometry, state: SavedState) -> bytes:
    def fill(index: int, kept: bool, rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        if not kept:
            np.copyto(rows, state.groups[index].rows)
            np.copyto(dither, state.groups[index].dither)

    tables = [
        kv_state.Table(cells.pos, cells.seq, cells.lost, (cells.pos[:0], cells.seq[:0]))
        for cells in state.groups
    ]
    return kv_state.pack(geometry, state.whole, tables, fill, state.checkpoints)

"""Saved states of cells that never were in a cache."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import xxhash

from pykvgraph.state import format as kv_state
from pykvgraph.state.format import Geometry, SavedCells

HERE = Geometry(bytes(range(16)), 2, 4, 8, 16, 1, 0, cell_bytes=2 * 4 * (8 * 2 + 16 * 4))
HEADER, CHECKSUM_AT = 112, 104


def saved(n_cells: int = 7, n_seq: int = 11, whole: bool = True, seed: int = 0) -> SavedCells:
    """Cells in order of position, each of one to three sequences."""
    rng = np.random.default_rng(seed)
    seq = np.zeros((n_cells, n_seq), np.bool_)
    for row in seq:
        row[rng.choice(n_seq, min(n_seq, 1 + int(rng.integers(3))), replace=False)] = True
    pos = np.sort(rng.integers(0, 2**31, n_cells)).astype(np.int32)
    rows = rng.integers(0, 256, n_cells * HERE.cell_bytes).astype(np.uint8)
    rows &= 0xBF  # no exponent is all ones
    return SavedCells(whole, pos, seq, rng.integers(0, 256, n_cells).astype(np.uint8), rows)


def packed(geometry: Geometry, cells: SavedCells) -> bytes:
    def fill(rows: npt.NDArray[np.uint8], dither: npt.NDArray[np.uint8]) -> None:
        np.copyto(rows, cells.rows)
        np.copyto(dither, cells.dither)

    return kv_state.pack(geometry, cells.whole, cells.pos, cells.seq, fill)


def sign(blob: bytearray) -> bytearray:
    """The header's checksum, as somebody would set it who forges one."""
    struct.pack_into("<Q", blob, CHECKSUM_AT, xxhash.xxh3_64_intdigest(bytes(blob[:CHECKSUM_AT])))
    return blob

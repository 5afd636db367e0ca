"""Cells taken out of a cache, group by group, and the table in which both formats keep all but K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import CacheFullError, StateError
from pykvgraph.kv_cache.saved.device_rows import PackedGroup

MAX_SEQ = 256  # of any cache


@dataclass(frozen=True)
class SavedCells:
    """Cells of one group.

    pos: int32 (n,), seq: bool (n, n_seq), dither: uint8 (n,), rows: uint8 (n * cell_bytes,). lost: int32
    (n_seq,), of each sequence the highest position that a window has lost, -1: none. kept: bool (n, n_seq),
    the sequences that don't see the cell, and whose checkpoints hold it.
    packed: rows of layers that are not in `rows`; None: all are there.
    """

    pos: npt.NDArray[np.int32]
    seq: npt.NDArray[np.bool_]
    dither: npt.NDArray[np.uint8]  # which K carries, docs/state-format.md
    rows: npt.NDArray[np.uint8]
    lost: npt.NDArray[np.int32]
    kept: npt.NDArray[np.bool_]
    packed: PackedGroup | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A position that a sequence can come back to: its cells beyond `lost` and before p are held.

    seq: its place among those that are saved. lost: of each group, -1: none.
    """

    seq: int
    p: int
    lost: tuple[int, ...]


@dataclass(frozen=True)
class SavedRows:
    """Recurrent states: rows of float32 (n_rows, floats), and who has which.

    owners: int32 (n, 3): a sequence's place among those that are saved, the position of its checkpoint or -1
    for where the sequence ends, and the row.
    """

    owners: npt.NDArray[np.int32]
    rows: npt.NDArray[np.float32]


@dataclass(frozen=True)
class SavedState:
    """What a blob holds."""

    whole: bool  # the whole cache, else one sequence, with n_seq 1
    groups: tuple[SavedCells, ...]
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    states: SavedRows | None = None  # None: no layer has one
    pending: tuple[tuple[int, int], ...] = ()  # a sequence's place among those that are saved, and a token


@dataclass(frozen=True)
class Counts:
    """What is said of a table before it: whose cells they are, how many sequences, how many cells."""

    whole: int
    n_seq: int
    n_cells: int

    @property
    def table_bytes(self) -> int:
        """Bytes of the table."""
        return self.n_cells * (4 + 1 + -(-self.n_seq // 8))

    def check(self) -> None:
        """Raises StateError for what can't be."""
        if self.whole > 1 or not 1 <= self.n_seq <= (MAX_SEQ if self.whole else 1):
            raise StateError(
                f"the saved state has kind {self.whole} with {self.n_seq} sequences, and there is no such "
                "thing"
            )


def check_room(n_cells: Sequence[int], room: Sequence[int] | None) -> None:
    """Raises CacheFullError where a group has fewer cells than are saved. room None: nobody asks."""
    for index, (wanted, there) in enumerate(zip(n_cells, room or (), strict=False)):
        if wanted > there:
            raise CacheFullError(
                f"what is loaded needs {wanted} cells in group {index}, and this cache has {there}: open the "
                "context with a larger n_ctx"
            )


def write_table(
    pos: npt.NDArray[np.int32], seq: npt.NDArray[np.bool_], dither: npt.NDArray[np.uint8]
) -> bytes:
    """Positions, then dithers, then a bit for each sequence."""
    bits = np.packbits(seq, axis=1, bitorder="little")
    return pos.astype("<i4").tobytes() + dither.tobytes() + bits.tobytes()


def read_table(table: memoryview, counts: Counts, rows: npt.NDArray[np.uint8]) -> SavedCells:
    """The cells of a table of `counts.table_bytes` bytes. Raises StateError for cells that can't be."""
    n_cells, n_seq = counts.n_cells, counts.n_seq
    pos = np.frombuffer(table, "<i4", n_cells).astype(np.int32)
    dither = np.frombuffer(table, np.uint8, n_cells, offset=4 * n_cells)
    bits = np.frombuffer(table, np.uint8, offset=5 * n_cells).reshape(n_cells, -(-n_seq // 8))
    flags = np.unpackbits(bits, axis=1, bitorder="little").view(np.bool_)
    seq = flags[:, :n_seq]
    if (pos < 0).any() or not seq.any(axis=1).all() or flags[:, n_seq:].any():
        raise StateError("the saved state holds a cell without a position, or of no sequence that can be")
    return SavedCells(pos, seq, dither, rows, np.full(n_seq, -1, np.int32), np.zeros_like(seq))


def read_lost(section: memoryview, cells: SavedCells) -> npt.NDArray[np.int32]:
    """What sequences have lost in a window. Raises StateError where they still have it."""
    if len(section) != 4 * cells.seq.shape[1]:
        raise StateError(
            f"the saved state tells in {len(section)} bytes what {cells.seq.shape[1]} sequences have lost"
        )
    lost = np.frombuffer(section, "<i4").astype(np.int32)
    if (lost < -1).any() or (cells.seq & (cells.pos[:, None] <= lost)).any():
        raise StateError("the saved state holds cells of positions that are lost: somebody forged it")
    return lost


def are_alike(one: SavedCells, other: SavedCells) -> bool:
    """Whether two groups have cells at the same positions, seen by the same sequences, in whatever order."""
    (one_pos, one_bits), (other_pos, other_bits) = _in_order(one), _in_order(other)
    return np.array_equal(one_pos, other_pos) and np.array_equal(one_bits, other_bits)


def _in_order(cells: SavedCells) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Positions, and sequences as bits, by position and then by sequences."""
    bits = np.packbits(cells.seq, axis=1)
    order = np.lexsort((*bits.T, cells.pos))
    return cells.pos[order], bits[order]

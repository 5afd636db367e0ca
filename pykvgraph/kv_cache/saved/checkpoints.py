"""Checkpoints in saved states, and what of a state goes into windows that have less room than it had."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.cells import SavedCells, SavedCheckpoint, SavedState
from pykvgraph.kv_cache.saved.geometry import Geometry, GroupGeometry
from pykvgraph.kv_cache.saved.rows import parts_of
from pykvgraph.kv_cache.saved.states import with_checkpoints

_FRONT = struct.Struct("<II")  # how many, bytes of a record
_RECORD = struct.Struct("<Ii")  # sequence, position; then what each group with a window has lost


def pack_checkpoints(checkpoints: Sequence[SavedCheckpoint], windows: Sequence[int]) -> bytes:
    """windows: the groups that have one."""
    parts = [_FRONT.pack(len(checkpoints), _RECORD.size + 4 * len(windows))]
    for each in checkpoints:
        lost = (each.lost[index] for index in windows)
        parts.append(_RECORD.pack(each.seq, each.p) + struct.pack(f"<{len(windows)}i", *lost))
    return b"".join(parts)


def read_checkpoints(
    section: memoryview, windows: Sequence[int], n_groups: int, n_seq: int
) -> tuple[SavedCheckpoint, ...]:
    """What a record has beyond these fields is left to later readers. Raises StateError."""
    if len(section) < _FRONT.size:
        raise StateError("the saved state's section CKPT 0 is too short")
    n, n_bytes = _FRONT.unpack_from(section)
    if n_bytes < _RECORD.size + 4 * len(windows) or len(section) != _FRONT.size + n * n_bytes:
        raise StateError(
            f"the saved state's section CKPT 0 has {len(section)} bytes and tells of {n} checkpoints of "
            f"{n_bytes} bytes each: it is damaged; save it again"
        )
    found: dict[tuple[int, int], SavedCheckpoint] = {}
    for offset in range(_FRONT.size, len(section), n_bytes):
        seq, p = _RECORD.unpack_from(section, offset)
        told = struct.unpack_from(f"<{len(windows)}i", section, offset + _RECORD.size)
        if seq >= n_seq or p < 1 or (seq, p) in found or not all(-1 <= lost < p for lost in told):
            raise StateError(f"the saved state has a checkpoint at position {p} that can't be")
        lost = dict(zip(windows, told, strict=True))
        found[seq, p] = SavedCheckpoint(seq, p, tuple(lost.get(index, -1) for index in range(n_groups)))
    return tuple(found.values())


def joined(geometry: GroupGeometry, cells: SavedCells, kept: SavedCells) -> SavedCells:
    """The cells, and behind them those that only checkpoints hold: `seq` says whose."""
    parts = zip(parts_of(geometry, cells.rows), parts_of(geometry, kept.rows), strict=True)
    n_cells, n_kept = len(cells.pos), len(kept.pos)
    rows = [part.ravel() for both in parts for part in both]
    return SavedCells(
        np.concatenate([cells.pos, kept.pos]),
        np.concatenate([cells.seq, np.zeros_like(kept.seq)]),
        np.concatenate([cells.dither, kept.dither]),
        np.concatenate(rows) if rows and n_cells + n_kept else cells.rows,
        cells.lost,
        np.concatenate([np.zeros_like(cells.seq), kept.seq]),
    )


def fitted(state: SavedState, geometry: Geometry, room: Sequence[int], n_checkpoints: int) -> SavedState:
    """As much of a state as goes into a cache.

    room: cells of each group, -1 for one that keeps every position. In the others sequences lose what is
    furthest behind their last positions, as far as needed, and no more than their windows leave behind.
    n_checkpoints: of the checkpoints so many stay, those at the highest positions.
    """
    checkpoints = sorted(state.checkpoints, key=lambda each: -each.p)[:n_checkpoints]
    groups = [
        _fitted(cells, group, room[index], [(each.seq, each.lost[index], each.p) for each in checkpoints])
        for index, (cells, group) in enumerate(zip(state.groups, geometry.groups, strict=True))
    ]
    states = state.states and with_checkpoints(state.states, checkpoints)
    return replace(state, groups=tuple(groups), checkpoints=tuple(checkpoints), states=states)


def _fitted(
    cells: SavedCells, group: GroupGeometry, room: int, held: Sequence[tuple[int, int, int]]
) -> SavedCells:
    """held: of each checkpoint its sequence, what it has lost, and its position."""
    held_here = np.zeros_like(cells.kept)
    for owner, behind, p in held:
        last_lost = max(behind, p - 1 - group.window) if room >= 0 else behind
        held_here[:, owner] |= (cells.pos > last_lost) & (cells.pos < p)
    n_over = 0
    while True:
        lost = _lost_in(cells, group.window, n_over)
        gone = cells.seq & (cells.pos[:, None] <= lost)
        seq, kept = cells.seq & ~gone, held_here & (cells.kept | gone)
        left = np.flatnonzero((seq | kept).any(axis=1))
        too_many = len(left) - room
        if room < 0 or too_many <= 0 or n_over >= len(cells.pos):
            break
        n_over += too_many  # some of what is left out stays for checkpoints
    if len(left) == len(cells.pos):
        return replace(cells, seq=seq, kept=kept, lost=lost)
    rows = [part[left].ravel() for part in parts_of(group, cells.rows)]
    kept_rows = np.concatenate(rows) if rows else cells.rows
    packed = cells.packed and cells.packed.of(left)
    return SavedCells(cells.pos[left], seq[left], cells.dither[left], kept_rows, lost, kept[left], packed)


def _lost_in(cells: SavedCells, window: int, n_over: int) -> npt.NDArray[np.int32]:
    """What sequences have lost where so many cells of theirs are too many."""
    seen = cells.seq.any(axis=1)
    lost: npt.NDArray[np.int32] = cells.lost.copy()
    if n_over <= 0:
        return lost
    pos = cells.pos.astype(np.int64)[:, None]
    last = np.where(cells.seq, pos, -1).max(axis=0)
    far = np.where(cells.seq, last - pos, np.iinfo(np.int64).max).min(axis=1)  # behind, in each sequence
    far[~seen | (far < window)] = -1
    over = np.argsort(-far, kind="stable")[: min(n_over, int((far >= 0).sum()))]
    highest = np.where(cells.seq[over], pos[over], -1).max(axis=0, initial=-1)
    np.maximum(lost, highest, out=lost, casting="same_kind")
    return lost

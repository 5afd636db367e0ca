"""Recurrent states in saved states: the section STAT."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.cells import SavedCheckpoint, SavedRows

_FRONT = struct.Struct("<IIQ")  # owners, rows, bytes of a row; then the rows, then the owners
_OWNER_BYTES = 12
_END = -1  # in place of a checkpoint's position: where the sequence ends


def section_bytes(n_owners: int, n_rows: int, row_bytes: int) -> int:
    """Of the section."""
    return _FRONT.size + n_rows * row_bytes + n_owners * _OWNER_BYTES


def write_states(
    place: npt.NDArray[np.uint8], owners: npt.NDArray[np.int32], n_rows: int, row_bytes: int
) -> npt.NDArray[np.float32]:
    """Writes all but the rows into the section; returns where these go, (n_rows, floats)."""
    place[: _FRONT.size] = np.frombuffer(_FRONT.pack(len(owners), n_rows, row_bytes), np.uint8)
    end = _FRONT.size + n_rows * row_bytes
    place[end:] = np.frombuffer(owners.astype("<i4").tobytes(), np.uint8)
    return place[_FRONT.size : end].view(np.float32).reshape(n_rows, row_bytes // 4)


def read_states(
    section: memoryview,
    row_bytes: int,
    with_cells: npt.NDArray[np.bool_],
    checkpoints: Sequence[SavedCheckpoint],
) -> SavedRows:
    """Raises StateError for states that can't be, or that nobody has.

    with_cells: (n_seq,): which sequences have any cell. One without can't have a state where it ends.
    """
    if len(section) < _FRONT.size:
        raise StateError("the saved state's section STAT 0 is too short")
    n_owners, n_rows, saved_bytes = _FRONT.unpack_from(section)
    if saved_bytes != row_bytes:
        raise StateError(
            f"the saved state has recurrent states of {saved_bytes} bytes; this model's have {row_bytes}"
        )
    if len(section) != section_bytes(n_owners, n_rows, row_bytes):
        raise StateError(
            f"the saved state's section STAT 0 has {len(section)} bytes and tells of {n_rows} states and "
            f"{n_owners} who have them: it is damaged; save it again"
        )
    end = _FRONT.size + n_rows * row_bytes
    rows = np.frombuffer(section[_FRONT.size : end], np.float32).reshape(n_rows, row_bytes // 4)
    owners = np.frombuffer(section[end:], "<i4").reshape(n_owners, 3).astype(np.int32)
    whose = {(int(seq), int(p)) for seq, p, _ in owners}
    wanted = {(each.seq, each.p) for each in checkpoints}
    n_seq = len(with_cells)
    may_be = (owners[:, 0] >= 0) & (owners[:, 0] < n_seq) & (owners[:, 2] >= 0) & (owners[:, 2] < n_rows)
    if not may_be.all() or len(whose) != n_owners or {one for one in whose if one[1] != _END} != wanted:
        raise StateError("the saved state has recurrent states of sequences or checkpoints that aren't there")
    if not with_cells[owners[owners[:, 1] == _END, 0]].all():
        raise StateError(
            "the saved state has a recurrent state of a sequence without cells: of tokens that aren't there"
        )
    if len(np.unique(owners[:, 2])) != n_rows:
        raise StateError("the saved state has a recurrent state that nobody has")
    if not np.isfinite(rows).all():
        raise StateError("the saved state has a recurrent state with a number that isn't finite")
    return SavedRows(owners, rows)


def with_checkpoints(states: SavedRows, checkpoints: Sequence[SavedCheckpoint]) -> SavedRows:
    """Without those of other checkpoints."""
    left = {(each.seq, each.p) for each in checkpoints}
    owners = np.array(
        [owner for owner in states.owners.tolist() if owner[1] == _END or (owner[0], owner[1]) in left],
        np.int32,
    ).reshape(-1, 3)
    used, index = np.unique(owners[:, 2], return_inverse=True)
    rows = states.rows if len(used) == len(states.rows) else states.rows[used]
    return SavedRows(np.column_stack([owners[:, :2], index]).astype(np.int32), rows)

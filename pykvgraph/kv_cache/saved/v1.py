"""Format 1 of saved states, which is read and no longer written: one group of cells, one header."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from pykvgraph._native.ffi import KvgGroupKind
from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.cells import Counts, SavedState, check_room, read_table
from pykvgraph.kv_cache.saved.geometry import Geometry, check_model, check_number
from pykvgraph.kv_cache.saved.rows import GroupRows, check_rows
from pykvgraph.kv_cache.saved.source import Source

VERSION = 1

# magic, version, header bytes, total bytes | model fingerprint | n_layer, n_head_kv, head_dim_k, head_dim_v,
# type_k, type_v, cell bytes | whole?, n_seq, n_cells | checksums of cells and rows; then the one of all that
_HEADER = struct.Struct("<8sIIQ16sIIIIIIQIIQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_NAMES = ("n_layer", "n_head_kv", "head_dim_k", "head_dim_v", "type_k", "type_v", "cell_bytes")


def read(source: Source, here: Geometry, room: Sequence[int] | None) -> SavedState:
    """The cells of a state that begins with the magic and this version. Raises as `format.unpack` does."""
    data = source.read(0, HEADER_BYTES)
    header, (checksum,) = data[: _HEADER.size], _CHECKSUM.unpack(data[_HEADER.size :])
    if xxhash.xxh3_64_intdigest(header) != checksum:
        raise StateError("the saved state's header is damaged: its checksum differs; save it again")
    _, _, header_bytes, total, model, *shape, whole, n_seq, n_cells, cells_sum, rows_sum = _HEADER.unpack(
        header
    )
    if header_bytes != HEADER_BYTES:
        raise StateError(f"the saved state has a header of {header_bytes} bytes: that is no format 1")
    _check_shape(model, shape, here)
    counts = Counts(whole, n_seq, n_cells)
    counts.check()
    group = here.groups[0]
    n_rows_bytes = n_cells * group.cell_bytes
    if total != source.size or total != HEADER_BYTES + counts.table_bytes + n_rows_bytes:
        raise StateError(
            f"the saved state has {source.size} bytes, and its header tells of {total} for {n_cells} cells: "
            "it is cut off or damaged; save it again"
        )
    check_room([n_cells], room)
    table = source.read(HEADER_BYTES, counts.table_bytes)
    if xxhash.xxh3_64_intdigest(table) != cells_sum:
        raise StateError("the saved state's cells are damaged: their checksum differs; save it again")
    rows = source.read(HEADER_BYTES + counts.table_bytes, n_rows_bytes)
    check_rows([GroupRows(group, rows, rows_sum, n_cells)])
    return SavedState(bool(whole), (read_table(table, counts, np.frombuffer(rows, np.uint8)),))


def _check_shape(model: bytes, shape: Sequence[int], here: Geometry) -> None:
    """Raises StateError unless the cache is one that format 1 can tell of, and the one that it tells of."""
    check_model(model, here)
    check_number("the number of groups", 1, len(here.groups))
    check_number("bytes of a recurrent state", 0, here.state_bytes)
    group = here.groups[0]
    check_number("kind", int(KvgGroupKind.KVG_GROUP_FULL), group.kind)
    for name, theirs in zip(_NAMES, shape, strict=True):
        check_number(name, theirs, getattr(group, name))

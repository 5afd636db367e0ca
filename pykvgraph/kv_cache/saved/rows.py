"""Rows of K and V in saved states: how types lie in memory, checksums, and that every value is finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from pykvgraph._native.ffi import KvgType
from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.geometry import HADAMARD, GroupGeometry


@dataclass(frozen=True)
class _Layout:
    """How a type lies in memory: blocks of `size` values, `n_floats` floats and then what is finite anyway.

    The floats as integers, for NumPy is slow with float16, and the exponent's bits: infinity and NaN have
    them all.
    """

    size: int
    n_bytes: int
    dtype: str
    n_floats: int
    exponent: int


_LAYOUTS: dict[int, _Layout] = {
    KvgType.KVG_TYPE_F32: _Layout(1, 4, "<u4", 1, 0x7F80_0000),
    KvgType.KVG_TYPE_F16: _Layout(1, 2, "<u2", 1, 0x7C00),
    KvgType.KVG_TYPE_BF16: _Layout(1, 2, "<u2", 1, 0x7F80),
    # a scale in F16, and in the _1 types an offset
    KvgType.KVG_TYPE_Q8_0: _Layout(32, 34, "<u2", 1, 0x7C00),
    KvgType.KVG_TYPE_Q5_1: _Layout(32, 24, "<u2", 2, 0x7C00),
    KvgType.KVG_TYPE_Q5_0: _Layout(32, 22, "<u2", 1, 0x7C00),
    KvgType.KVG_TYPE_Q4_1: _Layout(32, 20, "<u2", 2, 0x7C00),
    KvgType.KVG_TYPE_Q4_0: _Layout(32, 18, "<u2", 1, 0x7C00),
}
_CHUNK = 1 << 18  # blocks looked at at a time: K and V may be most of what memory there is
_SHARED_BYTES = 1 << 22  # less isn't worth a second thread


@dataclass(frozen=True)
class GroupRows:
    """The rows of a group's cells: for each layer K of every cell, then V of every cell."""

    geometry: GroupGeometry
    data: memoryview
    checksum: int
    n_cells: int


def parts_of(geometry: GroupGeometry, rows: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    """Views of K and of V of each layer in its turn: (n_cells, bytes of a row)."""
    n_cells, offset = rows.size // max(geometry.cell_bytes, 1), 0  # 0: no layers
    for _ in geometry.layers:
        for head_dim, kind in (
            (geometry.head_dim_k, geometry.type_k),
            (geometry.head_dim_v, geometry.type_v),
        ):
            layout = _LAYOUTS[kind % HADAMARD]
            n_bytes = n_cells * (geometry.n_head_kv * head_dim // layout.size * layout.n_bytes)
            yield rows[offset : offset + n_bytes].reshape(n_cells, -1 if n_cells else 1)
            offset += n_bytes


def check_rows(groups: Sequence[GroupRows]) -> None:
    """Checksums, and that K and V are finite. Raises StateError."""
    if sum(len(group.data) for group in groups) < _SHARED_BYTES:
        sums = [xxhash.xxh3_64_intdigest(group.data) for group in groups]
        infinite = _first_of(groups)
    else:
        with ThreadPoolExecutor(1) as beside:  # long calls without Python's lock
            futures = [beside.submit(xxhash.xxh3_64_intdigest, group.data) for group in groups]
            infinite = _first_of(groups)
            sums = [future.result() for future in futures]
    if sums != [group.checksum for group in groups]:
        raise StateError("the saved state's K and V are damaged: their checksum differs; save it again")
    if infinite is not None:
        raise _not_finite(infinite)


def require_finite(rows: memoryview, kind: int, name: str) -> None:
    """K or V of any cells, of one type (with HADAMARD and LONG_ROPE). Raises StateError, which names it."""
    if not _is_finite(rows, _LAYOUTS[kind % HADAMARD]):
        raise _not_finite(name)


def _not_finite(name: str) -> StateError:
    return StateError(
        f"{name} has a number that is not finite: the model overflowed before it was saved or sent, "
        "or somebody forged it"
    )


def _first_of(groups: Sequence[GroupRows]) -> str | None:
    return next((found for group in groups if (found := _first_infinite(group)) is not None), None)


def _first_infinite(rows: GroupRows) -> str | None:
    """Where an infinity or a NaN is: it would reach sequences that don't see it, as 0 times it is NaN."""
    here, offset = rows.geometry, 0
    for layer in here.layers:
        for name, head_dim, kind in (
            ("K", here.head_dim_k, here.type_k),
            ("V", here.head_dim_v, here.type_v),
        ):
            layout = _LAYOUTS[kind % HADAMARD]
            n_bytes = rows.n_cells * here.n_head_kv * head_dim // layout.size * layout.n_bytes
            part, offset = rows.data[offset : offset + n_bytes], offset + n_bytes
            if not _is_finite(part, layout):
                return f"{name} in layer {layer}"
    return None


def _is_finite(rows: memoryview, layout: _Layout) -> bool:
    words = np.frombuffer(rows, layout.dtype)
    floats = words.reshape(-1, layout.n_bytes // words.itemsize)[:, : layout.n_floats]
    signed = floats.view(layout.dtype.replace("u", "i"))
    sign = 1 << (8 * words.itemsize - 1)
    for begin in range(0, len(floats), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        # as integers, +infinity and +NaN are above all positive numbers, -infinity and -NaN above all others
        if signed[part].max() >= layout.exponent or floats[part].max() >= sign | layout.exponent:
            return False
    return True

"""Saved cells as bytes: the format of docs/state-format.md, written and checked.

Knows nothing of contexts. A blob from outside is hostile until `unpack` has returned.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from pykvgraph._native.ffi import KvgType
from pykvgraph.errors import StateError

MAGIC = b"KVGSTATE"
VERSION = 1
MAX_SEQ = 256  # of any cache
HADAMARD = 256  # added to a type whose rows are kept times a Hadamard matrix

# magic, version, header bytes, total bytes | model fingerprint | n_layer, n_head_kv, head_dim_k, head_dim_v,
# type_k, type_v, cell bytes | whole?, n_seq, n_cells | checksums of cells and rows; then the one of all that
_HEADER = struct.Struct("<8sIIQ16sIIIIIIQIIQQQ")
_CHECKSUM = struct.Struct("<Q")


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
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


@dataclass(frozen=True)
class Geometry:
    """What a saved row fits: another model, another cache type or another shape is another geometry."""

    model: bytes  # 16 bytes
    n_layer: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    type_k: int  # KvgType, and HADAMARD when rows are kept rotated
    type_v: int
    cell_bytes: int


@dataclass(frozen=True)
class SavedCells:
    """Cells taken out of a cache.

    pos: int32 (n,), seq: bool (n, n_seq), dither: uint8 (n,), rows: uint8 (n * cell_bytes,).
    """

    whole: bool  # the whole cache, else one sequence, with n_seq 1
    pos: npt.NDArray[np.int32]
    seq: npt.NDArray[np.bool_]
    dither: npt.NDArray[np.uint8]  # which K carries, docs/state-format.md
    rows: npt.NDArray[np.uint8]


def pack(
    geometry: Geometry,
    whole: bool,
    pos: npt.NDArray[np.int32],
    seq: npt.NDArray[np.bool_],
    fill: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], None],
) -> bytes:
    """A blob that `unpack` gives the same cells for.

    pos and seq as in SavedCells; `fill` writes rows and dither into the arrays that it is given.
    """
    bits = np.packbits(seq, axis=1, bitorder="little")
    rows_at = HEADER_BYTES + len(pos) * (4 + 1 + bits.shape[1])
    blob, place = _unwritten(rows_at + len(pos) * geometry.cell_bytes)
    dither = np.empty(len(pos), np.uint8)
    fill(place[rows_at:], dither)
    table = pos.astype("<i4").tobytes() + dither.tobytes() + bits.tobytes()
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        len(blob),
        geometry.model,
        geometry.n_layer,
        geometry.n_head_kv,
        geometry.head_dim_k,
        geometry.head_dim_v,
        geometry.type_k,
        geometry.type_v,
        geometry.cell_bytes,
        whole,
        seq.shape[1],
        len(pos),
        xxhash.xxh3_64_intdigest(table),
        xxhash.xxh3_64_intdigest(place[rows_at:].data),
    )
    front = header + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)) + table
    place[:rows_at] = np.frombuffer(front, np.uint8)
    return blob


def _unwritten(n_bytes: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """Bytes to be written before anybody else sees them, as PyBytes_FromStringAndSize allows: a copy less."""
    blob: bytes = _new_bytes(None, n_bytes)
    place = (ctypes.c_uint8 * n_bytes).from_address(_address_of(blob))
    return blob, np.ctypeslib.as_array(place)


def unpack(data: bytes | memoryview, geometry: Geometry) -> SavedCells:
    """The cells in a blob. Raises StateError for one that is damaged, or that doesn't fit this geometry."""
    data = memoryview(data)
    if len(data) < HEADER_BYTES or bytes(data[:8]) != MAGIC:
        raise StateError(f"these {len(data)} bytes are no saved state: expected {MAGIC!r} in front")
    header = data[: _HEADER.size]
    (checksum,) = _CHECKSUM.unpack(data[_HEADER.size : HEADER_BYTES])
    if xxhash.xxh3_64_intdigest(header) != checksum:
        raise StateError("the saved state's header is damaged: its checksum differs; save it again")
    fields = _HEADER.unpack(header)
    _, version, header_bytes, total, model, *shape, whole, n_seq, n_cells, cells_sum, rows_sum = fields
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise StateError(
            f"the saved state has format version {version}; this pykvgraph reads version {VERSION}"
        )
    _check_geometry(Geometry(model, *shape), geometry)
    row_bytes = -(-n_seq // 8)
    table_bytes = n_cells * (4 + 1 + row_bytes)
    if whole > 1 or not 1 <= n_seq <= (MAX_SEQ if whole else 1):
        raise StateError(
            f"the saved state has kind {whole} with {n_seq} sequences, and there is no such thing"
        )
    if total != len(data) or total != HEADER_BYTES + table_bytes + n_cells * geometry.cell_bytes:
        raise StateError(
            f"the saved state has {len(data)} bytes, and its header tells of {total} for {n_cells} cells: it "
            "is cut off or damaged; save it again"
        )
    table, rows = data[HEADER_BYTES : HEADER_BYTES + table_bytes], data[HEADER_BYTES + table_bytes :]
    _check_rows(table, cells_sum, rows, rows_sum, geometry, n_cells)
    pos = np.frombuffer(table, "<i4", n_cells).astype(np.int32)
    dither = np.frombuffer(table, np.uint8, n_cells, offset=4 * n_cells)
    bits = np.frombuffer(table, np.uint8, offset=5 * n_cells).reshape(n_cells, row_bytes)
    flags = np.unpackbits(bits, axis=1, bitorder="little").astype(np.bool_)
    seq = flags[:, :n_seq]
    if (pos < 0).any() or not seq.any(axis=1).all() or flags[:, n_seq:].any():
        raise StateError("the saved state holds a cell without a position, or of no sequence that can be")
    return SavedCells(bool(whole), pos, seq, dither, np.frombuffer(rows, np.uint8))


def checked_size(header: bytes, geometry: Geometry) -> int | None:
    """The bytes of the whole state, by a header that is whole, agrees with itself and fits this geometry.

    None for any other: `unpack` of the header alone says what is wrong with it.
    """
    (checksum,) = _CHECKSUM.unpack(header[_HEADER.size : HEADER_BYTES])
    if xxhash.xxh3_64_intdigest(header[: _HEADER.size]) != checksum:
        return None
    fields = _HEADER.unpack_from(header)
    _, version, header_bytes, total, model, *shape, _, n_seq, n_cells, _, _ = fields
    here = version == VERSION and header_bytes == HEADER_BYTES and Geometry(model, *shape) == geometry
    n_bytes = HEADER_BYTES + n_cells * (4 + 1 + -(-n_seq // 8) + geometry.cell_bytes)
    return n_bytes if here and total == n_bytes else None


def _check_geometry(saved: Geometry, here: Geometry) -> None:
    if saved.model != here.model:
        raise StateError("the state was saved from another model: K and V mean nothing to this one")
    for name in ("n_layer", "n_head_kv", "head_dim_k", "head_dim_v", "type_k", "type_v", "cell_bytes"):
        theirs, ours = getattr(saved, name), getattr(here, name)
        if theirs != ours:
            if name.startswith("type_"):
                theirs, ours = _type_name(theirs), _type_name(ours)
            raise StateError(
                f"the state was saved from a cache with {name} = {theirs}; this one has {ours}: open the "
                "context as that one was"
            )


def _type_name(kind: int) -> str:
    known = next((known for known in _LAYOUTS if known == kind % HADAMARD), None)
    if known is None or kind >= 2 * HADAMARD:
        return f"{kind}, which is unknown here"
    name = KvgType(known).name.removeprefix("KVG_TYPE_").lower()
    return f"{name} with hadamard" if kind >= HADAMARD else name


def _check_rows(
    table: memoryview, cells_sum: int, rows: memoryview, rows_sum: int, here: Geometry, n_cells: int
) -> None:
    """Checksums, and that K and V are finite."""
    if len(rows) < _SHARED_BYTES:
        infinite = _first_infinite(rows, here, n_cells)
        sum_of_rows = xxhash.xxh3_64_intdigest(rows)
    else:
        with ThreadPoolExecutor(1) as beside:  # one long call without Python's lock
            future = beside.submit(xxhash.xxh3_64_intdigest, rows)
            infinite = _first_infinite(rows, here, n_cells)
            sum_of_rows = future.result()
    sum_of_cells = xxhash.xxh3_64_intdigest(table)
    for name, is_whole in (
        ("cells", sum_of_cells == cells_sum),
        ("K and V", sum_of_rows == rows_sum),
    ):
        if not is_whole:
            raise StateError(f"the saved state's {name} are damaged: their checksum differs; save it again")
    if infinite is not None:
        raise StateError(
            f"the saved state has {infinite} that is not finite: the model overflowed before it was saved, "
            "or somebody forged it"
        )


def _first_infinite(rows: memoryview, here: Geometry, n_cells: int) -> str | None:
    """Where an infinity or a NaN is: it would reach sequences that don't see it, as 0 times it is NaN."""
    offset = 0
    for layer in range(here.n_layer):
        for name, head_dim, kind in (
            ("K", here.head_dim_k, here.type_k),
            ("V", here.head_dim_v, here.type_v),
        ):
            layout = _LAYOUTS[kind % HADAMARD]
            n_bytes = n_cells * here.n_head_kv * head_dim // layout.size * layout.n_bytes
            part, offset = rows[offset : offset + n_bytes], offset + n_bytes
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

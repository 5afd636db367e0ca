"""The format of saved states, as docs/state-format.md has it; damage."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from support.saved_cells import CHECKSUM_AT, HEADER, HERE, packed, saved, sign

from pykvgraph._native.ffi import KvgType
from pykvgraph.errors import StateError
from pykvgraph.state.format import Geometry, SavedCells, unpack


def documented(geometry: Geometry, cells: SavedCells) -> bytearray:
    """A blob written by the table of docs/state-format.md, offset by offset."""
    n_cells, n_seq = cells.seq.shape
    table = b"".join(struct.pack("<i", pos) for pos in cells.pos.tolist())
    table += bytes(cells.dither.tolist())
    for row in cells.seq.tolist():
        members = sum(1 << seq for seq in range(n_seq) if row[seq])
        table += members.to_bytes((n_seq + 7) // 8, "little")
    rows = cells.rows.tobytes()
    blob = bytearray(HEADER)
    blob[0:8] = b"KVGSTATE"
    struct.pack_into("<I", blob, 8, 1)
    struct.pack_into("<I", blob, 12, 112)
    struct.pack_into("<Q", blob, 16, HEADER + len(table) + len(rows))
    blob[24:40] = geometry.model
    struct.pack_into("<I", blob, 40, geometry.n_layer)
    struct.pack_into("<I", blob, 44, geometry.n_head_kv)
    struct.pack_into("<I", blob, 48, geometry.head_dim_k)
    struct.pack_into("<I", blob, 52, geometry.head_dim_v)
    struct.pack_into("<I", blob, 56, geometry.type_k)
    struct.pack_into("<I", blob, 60, geometry.type_v)
    struct.pack_into("<Q", blob, 64, geometry.cell_bytes)
    struct.pack_into("<I", blob, 72, int(cells.whole))
    struct.pack_into("<I", blob, 76, n_seq)
    struct.pack_into("<Q", blob, 80, n_cells)
    struct.pack_into("<Q", blob, 88, xxhash.xxh3_64_intdigest(table, seed=0))
    struct.pack_into("<Q", blob, 96, xxhash.xxh3_64_intdigest(rows, seed=0))
    return sign(blob + table + rows)


KINDS = {
    "whole": saved(),
    "whole, many ids": saved(n_seq=65),
    "whole, empty": saved(n_cells=0, n_seq=3),
    "sequence": saved(n_seq=1, whole=False),
    "empty sequence": saved(n_cells=0, n_seq=1, whole=False),
}
by_kind = pytest.mark.parametrize("cells", KINDS.values(), ids=KINDS.keys())


@by_kind
def test_format_is_the_documented_one(cells: SavedCells) -> None:
    assert packed(HERE, cells) == documented(HERE, cells)


@by_kind
def test_back_come_the_same_cells(cells: SavedCells) -> None:
    back = unpack(packed(HERE, cells), HERE)
    assert back.whole == cells.whole
    for name in ("pos", "seq", "rows"):
        ours: npt.NDArray[Any] = getattr(back, name)
        assert np.array_equal(ours, getattr(cells, name))
        assert ours.dtype == getattr(cells, name).dtype


def damage(rng: random.Random, blob: bytes) -> bytes:
    """One change: bits, bytes, fields, pieces, lengths."""
    changed = bytearray(blob)
    begin = rng.choice([rng.randrange(len(blob)), rng.randrange(HEADER)])
    end = min(begin + rng.choice([1, 2, 4, 8, 112, len(blob)]), len(blob))
    kind = rng.randrange(9)
    if kind == 0:
        changed[begin] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[begin] = rng.randrange(256)
    elif kind == 2:
        changed[begin:end] = rng.randbytes(end - begin)
    elif kind == 3:
        changed[begin:end] = bytes(end - begin)
    elif kind == 4:
        del changed[begin:end]
    elif kind == 5:
        del changed[begin:]
    elif kind == 6:
        changed += rng.randbytes(rng.choice([1, 8, 1000]))
    elif kind == 7:
        changed[begin:begin] = changed[begin:end]
    else:
        other = rng.randrange(len(blob))
        changed[begin], changed[other] = changed[other], changed[begin]
    return bytes(changed)


def test_ten_thousand_damaged_blobs() -> None:
    """None is accepted unless nothing was changed."""
    rng = random.Random(4)
    n_refused = 0
    for cells in KINDS.values():
        blob = packed(HERE, cells)
        for _ in range(2500):
            changed = damage(rng, blob)
            if changed != blob:
                with pytest.raises(StateError):
                    unpack(changed, HERE)
                n_refused += 1
    assert n_refused >= 10_000


def test_any_bit_of_a_forged_header() -> None:
    """Its checksum is right, and what it says is not: in a header of 104 bytes no bit is idle."""
    cells = saved(n_seq=8)  # all bits in use: neither more nor fewer sequences fit
    cells.seq[:] = True
    for bit in range(8 * CHECKSUM_AT):
        blob = documented(HERE, cells)
        blob[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(StateError):
            unpack(bytes(sign(blob)), HERE)


def forge(blob: bytearray, **fields: tuple[int, str, int]) -> bytes:
    """Fields as (offset, format, value), and all checksums right."""
    for offset, form, value in fields.values():
        struct.pack_into(form, blob, offset, value)
    n_seq, n_cells = struct.unpack_from("<I", blob, 76)[0], struct.unpack_from("<Q", blob, 80)[0]
    table = bytes(blob[HEADER : HEADER + n_cells * (5 + (n_seq + 7) // 8)])
    struct.pack_into("<Q", blob, 88, xxhash.xxh3_64_intdigest(table))
    return bytes(sign(blob))


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(forge(documented(HERE, saved()), pos=(HEADER + 8, "<i", -1)), id="negative position"),
        pytest.param(
            forge(documented(HERE, saved()), seq=(HEADER + 5 * 7, "<H", 0)), id="cell without a sequence"
        ),
        pytest.param(
            forge(documented(HERE, saved()), seq=(HEADER + 5 * 7, "<H", 1 << 11)), id="sequence beyond n_seq"
        ),
        pytest.param(
            forge(documented(HERE, KINDS["whole, empty"]), n_seq=(76, "<I", 0)), id="no sequences at all"
        ),
        pytest.param(
            forge(documented(HERE, KINDS["whole, empty"]), n_seq=(76, "<I", 2**32 - 1)),
            id="gigabytes of sequences",
        ),
        pytest.param(forge(documented(HERE, KINDS["whole, empty"]), whole=(72, "<I", 2)), id="neither kind"),
        pytest.param(
            forge(documented(HERE, KINDS["whole, empty"]), whole=(72, "<I", 0)), id="a sequence of three"
        ),
    ],
)
def test_forged(forged: bytes) -> None:
    with pytest.raises(StateError):
        unpack(forged, HERE)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), [("K", "<f2"), ("V", "<f4")])
@pytest.mark.parametrize("place", [0, 300_000, -1])
def test_what_is_not_finite(value: float, layer: int, name: str, dtype: str, place: int) -> None:
    """Wherever it stands, and checksums and all."""
    cells = saved(n_cells=10_000)
    widths = {"K": 4 * 8 * 2, "V": 4 * 16 * 4}
    begin = len(cells.pos) * (layer * sum(widths.values()) + (widths["K"] if name == "V" else 0))
    part = cells.rows[begin : begin + len(cells.pos) * widths[name]].view(dtype)
    part[place] = np.finfo(dtype).max
    assert np.array_equal(unpack(packed(HERE, cells), HERE).rows, cells.rows)
    part[place] = value
    with pytest.raises(StateError, match=f"{name} in layer {layer} that is not finite"):
        unpack(packed(HERE, cells), HERE)


@pytest.mark.parametrize(
    ("kind", "block_bytes", "n_floats", "infinity"),
    [
        pytest.param(KvgType.KVG_TYPE_BF16, 2 * 32, 32, 0x7F80, id="bf16"),
        pytest.param(KvgType.KVG_TYPE_Q8_0, 34, 1, 0x7C00, id="q8_0"),
        pytest.param(KvgType.KVG_TYPE_Q5_1, 24, 2, 0x7C00, id="q5_1"),
        pytest.param(KvgType.KVG_TYPE_Q5_0, 22, 1, 0x7C00, id="q5_0"),
        pytest.param(KvgType.KVG_TYPE_Q4_1, 20, 2, 0x7C00, id="q4_1"),
        pytest.param(KvgType.KVG_TYPE_Q4_0, 18, 1, 0x7C00, id="q4_0"),
    ],
)
def test_floats_of_a_block(kind: KvgType, block_bytes: int, n_floats: int, infinity: int) -> None:
    """Scales and offsets are looked at, in every block; what a block holds beside them may be anything."""
    here = replace(HERE, head_dim_k=32, head_dim_v=32, type_k=kind, cell_bytes=2 * 4 * (block_bytes + 128))
    for place in (-1, *range(n_floats)):
        for block in (0, 13, 27):
            rows = np.full(7 * here.cell_bytes, 0xFF, np.uint8)
            k_bytes = 7 * 4 * block_bytes
            for layer in range(2):
                begin = layer * 7 * 4 * (block_bytes + 128)
                rows[begin + k_bytes : begin + k_bytes + 7 * 4 * 128] = 0
                floats = rows[begin : begin + k_bytes].view("<u2").reshape(28, -1)[:, :n_floats]
                floats[:] = infinity - 1  # the largest
                if layer == 1 and place >= 0:
                    floats[block, place] = infinity
            blob = packed(here, replace(saved(), rows=rows))
            if place < 0:
                unpack(blob, here)
            else:
                with pytest.raises(StateError, match="K in layer 1 that is not finite"):
                    unpack(blob, here)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("model", bytes(16), "another model"),
        ("n_layer", 3, "n_layer"),
        ("n_head_kv", 2, "n_head_kv"),
        ("head_dim_k", 16, "head_dim_k"),
        ("head_dim_v", 8, "head_dim_v"),
        ("type_k", 0, "type_k"),
        ("type_v", 1, "type_v"),
        ("cell_bytes", 1, "cell_bytes"),
    ],
)
def test_another_geometry(field: str, value: object, told: str) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(StateError, match=told):
        unpack(packed(HERE, saved()), replace(HERE, **changes))


@pytest.mark.parametrize(
    "junk", [b"", b"KVGSTATE", b"GGUF" + bytes(200), bytes(112), b"KVGSTATE" + bytes(104)]
)
def test_what_is_no_state(junk: bytes) -> None:
    with pytest.raises(StateError):
        unpack(junk, HERE)


def test_later_version() -> None:
    blob = documented(HERE, saved())
    struct.pack_into("<I", blob, 8, 2)
    with pytest.raises(StateError, match="version 2"):
        unpack(bytes(sign(blob)), HERE)

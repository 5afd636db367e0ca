"""Format 1 of saved states: still read, by the table of docs/state-format.md; damage."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import chance
from support.damage import damage
from support.saved_cells import HERE, NARROW, TWO_GROUPS_HERE, saved
from support.state_bytes import V1_CHECKSUM_AT, V1_HEADER, digest, format_1, sign_1

from pykvgraph.errors import CacheFullError, StateError
from pykvgraph.kv_cache.saved.cells import SavedState
from pykvgraph.kv_cache.saved.format import unpack

KINDS = {
    "whole": saved(),
    "whole, many ids": saved(n_seq=65),
    "whole, empty": saved(n_cells=0, n_seq=3),
    "sequence": saved(n_seq=1, whole=False),
    "empty sequence": saved(n_cells=0, n_seq=1, whole=False),
}


@pytest.mark.parametrize("state", KINDS.values(), ids=KINDS.keys())
def test_the_cells_are_read(state: SavedState) -> None:
    back = unpack(bytes(format_1(HERE, state)), HERE)
    assert back.whole == state.whole
    for name in ("pos", "seq", "dither", "rows"):
        assert np.array_equal(getattr(back.groups[0], name), getattr(state.groups[0], name))


def test_five_thousand_damaged_blobs() -> None:
    """None is accepted unless nothing was changed."""
    rng = random.Random(chance.seed(4))
    for state in KINDS.values():
        blob = bytes(format_1(HERE, state))
        for _ in range(1000):
            changed = damage(rng, blob, V1_HEADER)
            if changed != blob:
                with pytest.raises(StateError):
                    unpack(changed, HERE)


def test_any_bit_of_a_forged_header() -> None:
    """Its checksum is right, and what it says is not: in a header of 104 bytes no bit is idle."""
    state = saved(n_seq=8)  # all bits in use: neither more nor fewer sequences fit
    state.groups[0].seq[:] = True
    for bit in range(8 * V1_CHECKSUM_AT):
        blob = format_1(HERE, state)
        blob[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(StateError):
            unpack(bytes(sign_1(blob)), HERE)


def forge(blob: bytearray, **fields: tuple[int, str, int]) -> bytes:
    """Fields as (offset, format, value), and all checksums right."""
    for offset, form, value in fields.values():
        struct.pack_into(form, blob, offset, value)
    n_seq, n_cells = struct.unpack_from("<I", blob, 76)[0], struct.unpack_from("<Q", blob, 80)[0]
    table = bytes(blob[V1_HEADER : V1_HEADER + n_cells * (5 + (n_seq + 7) // 8)])
    struct.pack_into("<Q", blob, 88, digest(table))
    return bytes(sign_1(blob))


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(forge(format_1(HERE, saved()), pos=(V1_HEADER + 8, "<i", -1)), id="negative position"),
        pytest.param(
            forge(format_1(HERE, saved()), seq=(V1_HEADER + 5 * 7, "<H", 0)), id="cell without a sequence"
        ),
        pytest.param(
            forge(format_1(HERE, saved()), seq=(V1_HEADER + 5 * 7, "<H", 1 << 11)), id="sequence beyond n_seq"
        ),
        pytest.param(
            forge(format_1(HERE, KINDS["whole, empty"]), n_seq=(76, "<I", 0)), id="no sequences at all"
        ),
        pytest.param(
            forge(format_1(HERE, KINDS["whole, empty"]), n_seq=(76, "<I", 2**32 - 1)),
            id="gigabytes of sequences",
        ),
        pytest.param(forge(format_1(HERE, KINDS["whole, empty"]), whole=(72, "<I", 2)), id="neither kind"),
        pytest.param(
            forge(format_1(HERE, KINDS["whole, empty"]), whole=(72, "<I", 0)), id="a sequence of three"
        ),
    ],
)
def test_forged(forged: bytes) -> None:
    with pytest.raises(StateError):
        unpack(forged, HERE)


def test_what_is_not_finite() -> None:
    state = saved()
    state.groups[0].rows[-4:] = 0xFF
    with pytest.raises(StateError, match="V in layer 1 has a number that is not finite"):
        unpack(bytes(format_1(HERE, state)), HERE)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("layers", (0, 1, 2), "n_layer = 3"),
        ("n_head_kv", 2, "n_head_kv = 2"),
        ("head_dim_k", 16, "head_dim_k = 16"),
        ("head_dim_v", 8, "head_dim_v = 8"),
        ("type_k", 0, "type_k = f32"),
        ("type_v", 257, "type_v = f16 with hadamard"),
        ("cell_bytes", 1, "cell_bytes = 1"),
    ],
)
def test_another_geometry(field: str, value: object, told: str) -> None:
    changes: dict[str, Any] = {field: value}
    there = replace(HERE, groups=(replace(NARROW, **changes),))
    with pytest.raises(StateError, match=told):
        unpack(bytes(format_1(there, saved())), HERE)


def test_a_cache_that_it_cannot_tell_of() -> None:
    blob = bytes(format_1(HERE, saved()))
    with pytest.raises(StateError, match="another model"):
        unpack(blob, replace(HERE, model=bytes(16)))
    with pytest.raises(StateError, match="the number of groups = 1"):
        unpack(blob, TWO_GROUPS_HERE)
    with pytest.raises(StateError, match="kind = full; this one has window"):
        unpack(blob, replace(HERE, groups=(replace(NARROW, kind=1, window=4),)))


def test_more_cells_than_the_cache_has() -> None:
    blob = bytes(format_1(HERE, saved()))
    assert len(unpack(blob, HERE, (7,)).groups[0].pos) == 7
    with pytest.raises(CacheFullError, match="needs 7 cells in group 0, and this cache has 6"):
        unpack(blob, HERE, (6,))

"""Format 2 of saved states, as docs/state-format.md has it; damage."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import chance
from support.damage import damage
from support.saved_cells import HERE, NARROW, TWO_GROUPS_HERE, WIDE, WITH_WINDOW_HERE, packed, saved
from support.state_bytes import HEAD, HEADER, Part, changed, checkpoint_parts, container, digest, parts_of

from pykvgraph._native.ffi import KvgType
from pykvgraph.errors import CacheFullError, StateError
from pykvgraph.kv_cache.saved.cells import SavedState
from pykvgraph.kv_cache.saved.format import unpack
from pykvgraph.kv_cache.saved.geometry import Geometry

TWO = TWO_GROUPS_HERE
KINDS = {
    "whole": (HERE, saved()),
    "whole, many ids": (HERE, saved(n_seq=65)),
    "whole, empty": (HERE, saved(n_cells=0, n_seq=3)),
    "sequence": (HERE, saved(n_seq=1, whole=False)),
    "empty sequence": (HERE, saved(n_cells=0, n_seq=1, whole=False)),
    "two groups": (TWO, saved(geometry=TWO)),
    "with a window": (WITH_WINDOW_HERE, saved(geometry=WITH_WINDOW_HERE)),
    "two groups, sequence": (TWO, saved(n_seq=1, whole=False, geometry=TWO)),
    "two groups, empty": (TWO, saved(n_cells=0, geometry=TWO)),
}
by_kind = pytest.mark.parametrize(("here", "state"), KINDS.values(), ids=KINDS.keys())


@by_kind
def test_format_is_the_documented_one(here: Geometry, state: SavedState) -> None:
    blob = packed(here, state)
    assert blob == container(parts_of(here, state))
    assert len(blob) % 8 == 0


@by_kind
def test_back_come_the_same_cells(here: Geometry, state: SavedState) -> None:
    back = unpack(packed(here, state), here)
    assert back.whole == state.whole
    assert len(back.groups) == len(state.groups)
    for cells, expected in zip(back.groups, state.groups, strict=True):
        for name in ("pos", "seq", "dither", "rows", "lost"):
            ours: npt.NDArray[Any] = getattr(cells, name)
            assert np.array_equal(ours, getattr(expected, name))
            assert ours.dtype == getattr(expected, name).dtype


@by_kind
def test_thousands_of_damaged_blobs(here: Geometry, state: SavedState) -> None:
    """None is accepted unless nothing was changed."""
    rng = random.Random(chance.seed(4))
    blob = packed(here, state)
    n_front = blob.rindex(b"ROWS") + HEAD
    n_refused = 0
    for _ in range(1500):
        damaged = damage(rng, blob, n_front)
        if damaged != blob:
            with pytest.raises(StateError):
                unpack(damaged, here)
            n_refused += 1
    assert n_refused >= 1000


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


@by_kind
def test_any_bit_of_forged_heads(here: Geometry, state: SavedState) -> None:
    """Header and heads, each with a checksum that is right: no bit is idle."""
    blob = container(parts_of(here, state))
    heads = [0]
    offset = HEADER
    while offset < len(blob):
        heads.append(offset)
        n_bytes = struct.unpack_from("<Q", blob, offset + 16)[0]
        offset += HEAD + n_bytes + (8 - n_bytes % 8) % 8
    assert offset == len(blob)
    assert len(heads) == 2 + 2 * len(here.groups) + sum(group.kind for group in here.groups)
    for begin in heads:
        for bit in range(8 * 32):
            head = flipped(blob[begin : begin + 32], bit)
            forged = blob[:begin] + head + struct.pack("<Q", digest(head)) + blob[begin + 40 :]
            with pytest.raises(StateError):
                unpack(forged, here)


@pytest.mark.parametrize("here", [HERE, TWO], ids=["one group", "two groups"])
def test_any_bit_of_forged_contents(here: Geometry) -> None:
    """Of the geometry every bit counts, and of what stands before the cells."""
    state = saved(n_seq=8, geometry=here)  # all bits in use: neither more nor fewer sequences fit
    state.groups[0].seq[:] = True
    parts = parts_of(here, state)
    for place, part in enumerate(parts[: 1 + len(here.groups)]):
        for bit in range(8 * (16 if place else len(part.contents))):
            forged = replace(part, contents=flipped(part.contents, bit))
            with pytest.raises(StateError):
                unpack(container([*parts[:place], forged, *parts[place + 1 :]]), here)


CELLS = 16  # bytes before the cells of a section


@pytest.mark.parametrize(
    ("group", "offset", "form", "value", "told"),
    [
        pytest.param(0, CELLS + 8, "<i", -1, "without a position", id="negative position"),
        pytest.param(1, CELLS + 8, "<i", -1, "without a position", id="negative position of group 1"),
        pytest.param(0, CELLS + 5 * 7, "<H", 0, "of no sequence", id="cell without a sequence"),
        pytest.param(0, CELLS + 5 * 7, "<H", 1 << 11, "of no sequence", id="sequence beyond n_seq"),
        pytest.param(1, CELLS + 8, "<i", 5, "at other positions", id="groups at different positions"),
        pytest.param(1, CELLS + 5 * 7, "<H", 1, "of other sequences", id="groups of different sequences"),
        pytest.param(0, 0, "<I", 2, "kind 2 with 11 sequences", id="neither kind"),
        pytest.param(0, 0, "<I", 0, "kind 0 with 11 sequences", id="a sequence of eleven"),
        pytest.param(0, 4, "<I", 2**32 - 1, "tells of 7 cells", id="gigabytes of sequences"),
        pytest.param(0, 8, "<Q", 2**64 - 1, "tells of 18446744073709551615 cells", id="far too many cells"),
        pytest.param(1, 4, "<I", 12, "don't agree on what is saved", id="groups of more sequences"),
    ],
)
def test_forged_cells(group: int, offset: int, form: str, value: int, told: str) -> None:
    parts = parts_of(TWO, saved(geometry=TWO))
    assert parts[1 + group].contents[CELLS + 5 * 7 :][:2] != struct.pack("<H", 1)
    parts[1 + group] = changed(parts[1 + group], offset, form, value)
    with pytest.raises(StateError, match=told):
        unpack(container(parts), TWO)


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (b"", "in 0 bytes what 11 sequences"),
        (bytes(4 * 12), "in 48 bytes what 11 sequences"),
        (struct.pack("<11i", *[-2] * 11), "positions that are lost"),
        (struct.pack("<11i", *[2**31 - 1] * 11), "positions that are lost"),
    ],
)
def test_forged_losses(contents: bytes, told: str) -> None:
    here = WITH_WINDOW_HERE
    parts = parts_of(here, saved(geometry=here))
    place = next(i for i, part in enumerate(parts) if part.tag == b"LOST")
    with pytest.raises(StateError, match=told):
        unpack(
            container([*parts[:place], replace(parts[place], contents=contents), *parts[place + 1 :]]), here
        )
    with pytest.raises(StateError, match="has no section LOST 1"):
        unpack(container([*parts[:place], *parts[place + 1 :]]), here)
    with pytest.raises(StateError, match="has section LOST 0, and 2 groups of cells, 1 of them"):
        unpack(container([*parts[:place], replace(parts[place], index=0), *parts[place:]]), here)


def with_checkpoints() -> list[Part]:
    """Two, of sequences 1 and 3, and three cells that only they hold."""
    here = WITH_WINDOW_HERE
    kept = {1: saved(n_cells=3, seed=5, geometry=here).groups[1]}
    marks: list[tuple[int, ...]] = [(1, 40, -1), (3, 2**31 - 1, 25)]
    return [*parts_of(here, saved(geometry=here)), *checkpoint_parts(here, marks, kept)]


def test_checkpoints_and_what_they_hold() -> None:
    here, before = WITH_WINDOW_HERE, saved(geometry=WITH_WINDOW_HERE).groups[1]
    kept = saved(n_cells=3, seed=5, geometry=here).groups[1]
    back = unpack(container(with_checkpoints()), here)
    assert [(c.seq, c.p, c.lost) for c in back.checkpoints] == [(1, 40, (-1, -1)), (3, 2**31 - 1, (-1, 25))]
    cells = back.groups[1]
    assert cells.pos.tolist() == [*before.pos, *kept.pos]
    assert cells.dither.tolist() == [*before.dither, *kept.dither]
    assert np.array_equal(cells.seq[:7], before.seq) and not cells.seq[7:].any()
    assert np.array_equal(cells.kept[7:], kept.seq) and not cells.kept[:7].any()
    k_bytes, v_bytes = 3 * 10 * 2, 3 * 6 * 4  # of a cell; one layer: K of all, then V of all
    assert np.array_equal(cells.rows[7 * k_bytes : 10 * k_bytes], kept.rows[: 3 * k_bytes])
    assert np.array_equal(cells.rows[-3 * v_bytes :], kept.rows[3 * k_bytes :])
    assert len(cells.rows) == 10 * (k_bytes + v_bytes)
    longer = checkpoint_parts(here, [(1, 40, -1)], {1: kept})[0]
    longer = replace(longer, contents=struct.pack("<II", 1, 20) + longer.contents[8:] + bytes(8))
    parts = [replace(part) if part.tag != b"CKPT" else longer for part in with_checkpoints()]
    assert [c.p for c in unpack(container(parts), here).checkpoints] == [40]  # what a later record has more


def test_damaged_checkpoints() -> None:
    rng, blob = random.Random(chance.seed(9)), container(with_checkpoints())
    begin = blob.index(b"CKPT")
    for _ in range(600):
        changed_blob = bytearray(blob)
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed_blob[rng.randrange(begin, len(blob))] ^= 1 << rng.randrange(8)
        if changed_blob != blob:
            with pytest.raises(StateError):
                unpack(bytes(changed_blob), WITH_WINDOW_HERE)
        with pytest.raises(StateError):
            unpack(blob[: rng.randrange(len(blob))], WITH_WINDOW_HERE)


@pytest.mark.parametrize(
    ("tag", "offset", "form", "value", "told"),
    [
        (b"CKPT", 0, "<I", 3, "tells of 3 checkpoints"),
        (b"CKPT", 0, "<I", 2**32 - 1, "tells of 4294967295 checkpoints"),
        (b"CKPT", 4, "<I", 0, "of 0 bytes each"),
        (b"CKPT", 4, "<I", 11, "of 11 bytes each"),
        (b"CKPT", 8, "<I", 11, "can't be"),  # sequences
        (b"CKPT", 20, "<Ii", (1, 40), "can't be"),  # twice
        (b"CKPT", 12, "<i", 0, "can't be"),  # positions
        (b"CKPT", 12, "<i", -1, "can't be"),
        (b"CKPT", 16, "<i", -2, "can't be"),  # lost
        (b"CKPT", 16, "<i", 40, "can't be"),
        (b"KEPT", 0, "<I", 0, "kind 0 with 11"),
        (b"KEPT", 4, "<I", 12, "of other sequences"),
        (b"KEPT", 8, "<Q", 2**63, "tells of 9223372036854775808 cells"),
        (b"KEPT", 16, "<i", -1, "without a position"),
        (b"KROW", 0, "<H", 0x7C00, "not finite"),
    ],
)
def test_forged_checkpoints(
    tag: bytes, offset: int, form: str, value: int | tuple[int, ...], told: str
) -> None:
    values = value if isinstance(value, tuple) else (value,)
    forged = [
        changed(part, offset, form, *values) if part.tag == tag else part for part in with_checkpoints()
    ]
    with pytest.raises(StateError, match=told):
        unpack(container(forged), WITH_WINDOW_HERE)


@pytest.mark.parametrize("tag", [b"CKPT", b"KEPT", b"KROW"])
def test_checkpoints_of_which_something_is_missing(tag: bytes) -> None:
    parts = with_checkpoints()
    with pytest.raises(StateError):
        unpack(container([part for part in parts if part.tag != tag]), WITH_WINDOW_HERE)
    with pytest.raises(StateError, match="is marked as required"):
        required = [replace(part, flags=1) if part.tag == tag else part for part in parts]
        unpack(container(required), WITH_WINDOW_HERE)
    with pytest.raises(StateError):
        unpack(container([*parts, replace(parts[-1], index=0)]), WITH_WINDOW_HERE)


def test_a_sequence_beside_a_cache() -> None:
    whole, one = (saved(n_seq=1, whole=whole, geometry=TWO) for whole in (True, False))
    parts = parts_of(TWO, whole)
    parts[2] = parts_of(TWO, one)[2]
    with pytest.raises(StateError, match="don't agree"):
        unpack(container(parts), TWO)


def test_groups_in_another_order_are_alike() -> None:
    """Cells of one group may stand in another order than those of the other."""
    state = saved(geometry=TWO)
    other = state.groups[1]
    turned = replace(other, pos=other.pos[::-1], seq=other.seq[::-1])
    back = unpack(packed(TWO, SavedState(True, (state.groups[0], turned))), TWO)
    assert np.array_equal(back.groups[1].pos, other.pos[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), [("K", "<f2"), ("V", "<f4")])
@pytest.mark.parametrize("place", [0, 300_000, -1])
def test_what_is_not_finite(value: float, layer: int, name: str, dtype: str, place: int) -> None:
    """Wherever it stands, and checksums and all."""
    cells = saved(n_cells=10_000).groups[0]
    widths = {"K": 4 * 8 * 2, "V": 4 * 16 * 4}
    begin = len(cells.pos) * (layer * sum(widths.values()) + (widths["K"] if name == "V" else 0))
    part = cells.rows[begin : begin + len(cells.pos) * widths[name]].view(dtype)
    part[place] = np.finfo(dtype).max
    state = SavedState(True, (cells,))
    assert np.array_equal(unpack(packed(HERE, state), HERE).groups[0].rows, cells.rows)
    part[place] = value
    with pytest.raises(StateError, match=f"{name} in layer {layer} has a number that is not finite"):
        unpack(packed(HERE, state), HERE)


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
    group = replace(NARROW, head_dim_k=32, head_dim_v=32, type_k=kind, cell_bytes=2 * 4 * (block_bytes + 128))
    here = replace(HERE, groups=(group,))
    for place in (-1, *range(n_floats)):
        for block in (0, 13, 27):
            rows = np.full(7 * group.cell_bytes, 0xFF, np.uint8)
            k_bytes = 7 * 4 * block_bytes
            for layer in range(2):
                begin = layer * 7 * 4 * (block_bytes + 128)
                rows[begin + k_bytes : begin + k_bytes + 7 * 4 * 128] = 0
                floats = rows[begin : begin + k_bytes].view("<u2").reshape(28, -1)[:, :n_floats]
                floats[:] = infinity - 1  # the largest
                if layer == 1 and place >= 0:
                    floats[block, place] = infinity
            blob = packed(here, SavedState(True, (replace(saved().groups[0], rows=rows),)))
            if place < 0:
                unpack(blob, here)
            else:
                with pytest.raises(StateError, match="K in layer 1 has a number that is not finite"):
                    unpack(blob, here)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("kind", 1, "kind = window in group 1; this one has full"),
        ("kind", 7, "kind = 7 .unknown here. in group 1"),
        ("window", 9, "window = 9 in group 1"),
        ("layers", (2, 3), "n_layer = 2 in group 1"),
        ("layers", (1,), "layers"),
        ("n_head_kv", 2, "n_head_kv"),
        ("head_dim_k", 16, "head_dim_k"),
        ("head_dim_v", 8, "head_dim_v"),
        ("type_k", 0, "type_k = f32 in group 1"),
        ("type_v", 257, "type_v = f16 with hadamard in group 1"),
        ("type_v", 99, "type_v = 99, which is unknown here"),
        ("cell_bytes", 1, "cell_bytes"),
    ],
)
def test_another_geometry(field: str, value: object, told: str) -> None:
    changes: dict[str, Any] = {field: value}
    there = replace(TWO, groups=(NARROW, replace(WIDE, **changes)))
    with pytest.raises(StateError, match=told):
        unpack(container(parts_of(there, saved(geometry=TWO))), TWO)


def test_another_model_or_number_of_groups() -> None:
    with pytest.raises(StateError, match="another model"):
        unpack(packed(replace(HERE, model=bytes(16)), saved()), HERE)
    with pytest.raises(StateError, match="the number of groups = 1; this one has 2"):
        unpack(packed(HERE, saved()), TWO)
    with pytest.raises(StateError, match="the number of groups = 2; this one has 1"):
        unpack(packed(TWO, saved(geometry=TWO)), HERE)


def test_more_cells_than_the_cache_has() -> None:
    """Told before K and V are looked at."""
    parts = parts_of(TWO, saved(geometry=TWO))
    assert len(unpack(container(parts), TWO, (7, 7)).groups) == 2
    parts[-1] = replace(parts[-1], checksum=1)
    with pytest.raises(StateError, match="K and V are damaged"):
        unpack(container(parts), TWO, (7, 7))
    with pytest.raises(CacheFullError, match="needs 7 cells in group 1, and this cache has 6"):
        unpack(container(parts), TWO, (7, 6))


@pytest.mark.parametrize(
    "junk", [b"", b"KVGSTATE", b"GGUF" + bytes(200), bytes(112), b"KVGSTATE" + bytes(104)]
)
def test_what_is_no_state(junk: bytes) -> None:
    with pytest.raises(StateError):
        unpack(junk, HERE)


@pytest.mark.parametrize("version", [0, 3, 2**32 - 1])
def test_another_version(version: int) -> None:
    blob = bytearray(packed(HERE, saved()))
    struct.pack_into("<I", blob, 8, version)
    with pytest.raises(StateError, match=f"version {version}; this pykvgraph reads versions 1 and 2"):
        unpack(bytes(blob), HERE)

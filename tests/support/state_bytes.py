"""Saved states written and forged by the tables of docs/state-format.md, apart from what pykvgraph writes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import xxhash

from pykvgraph.kv_cache.saved.cells import SavedCells, SavedState
from pykvgraph.kv_cache.saved.geometry import Geometry

V1_HEADER, V1_CHECKSUM_AT = 112, 104
HEADER, HEAD = 40, 40


def digest(data: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(bytes(data), seed=0)


def table_of(cells: SavedCells) -> bytes:
    n_seq = cells.seq.shape[1]
    table = b"".join(struct.pack("<i", pos) for pos in cells.pos.tolist())
    table += bytes(cells.dither.tolist())
    for row in cells.seq.tolist():
        members = sum(1 << seq for seq in range(n_seq) if row[seq])
        table += members.to_bytes((n_seq + 7) // 8, "little")
    return table


# ---- format 2 ----


@dataclass(frozen=True)
class Part:
    """A section, right or wrong."""

    tag: bytes
    contents: bytes
    index: int = 0
    flags: int = 1
    checksum: int | None = None  # None: the right one
    n_bytes: int | None = None
    zero: int = 0

    def bytes(self) -> bytes:
        head = bytearray(32)
        head[0:4] = self.tag
        struct.pack_into("<I", head, 4, self.flags)
        struct.pack_into("<I", head, 8, self.index)
        struct.pack_into("<I", head, 12, self.zero)
        struct.pack_into("<Q", head, 16, len(self.contents) if self.n_bytes is None else self.n_bytes)
        struct.pack_into("<Q", head, 24, digest(self.contents) if self.checksum is None else self.checksum)
        padding = bytes((8 - len(self.contents) % 8) % 8)
        return bytes(head) + struct.pack("<Q", digest(head)) + self.contents + padding


def container(parts: list[Part], n_sections: int | None = None, total: int | None = None) -> bytes:
    """A blob of these sections, in their order, whatever they are."""
    body = b"".join(part.bytes() for part in parts)
    header = bytearray(32)
    header[0:8] = b"KVGSTATE"
    struct.pack_into("<I", header, 8, 2)
    struct.pack_into("<I", header, 12, 40)
    struct.pack_into("<Q", header, 16, 40 + len(body) if total is None else total)
    struct.pack_into("<I", header, 24, len(parts) if n_sections is None else n_sections)
    return bytes(header) + struct.pack("<Q", digest(header)) + body


def parts_of(geometry: Geometry, state: SavedState) -> list[Part]:
    """MODL, CELL of each group, LOST of those with a window, ROWS of each group."""
    model = geometry.model + struct.pack("<II", len(geometry.groups), 0)
    for group in geometry.groups:
        record = bytearray(48)
        struct.pack_into("<I", record, 0, group.kind)
        struct.pack_into("<I", record, 4, len(group.layers))
        struct.pack_into("<Q", record, 8, group.window)
        struct.pack_into("<I", record, 16, group.n_head_kv)
        struct.pack_into("<I", record, 20, group.head_dim_k)
        struct.pack_into("<I", record, 24, group.head_dim_v)
        struct.pack_into("<I", record, 28, group.type_k)
        struct.pack_into("<I", record, 32, group.type_v)
        struct.pack_into("<Q", record, 40, group.cell_bytes)
        model += bytes(record) + b"".join(struct.pack("<I", layer) for layer in group.layers)
    parts = [Part(b"MODL", model)]
    for index, cells in enumerate(state.groups):
        front = struct.pack("<IIQ", state.whole, cells.seq.shape[1], len(cells.pos))
        parts.append(Part(b"CELL", front + table_of(cells), index))
    for index, cells in enumerate(state.groups):
        if geometry.groups[index].kind == 1:
            parts.append(
                Part(b"LOST", b"".join(struct.pack("<i", pos) for pos in cells.lost.tolist()), index)
            )
    for index, cells in enumerate(state.groups):
        parts.append(Part(b"ROWS", cells.rows.tobytes(), index))
    return parts


def checkpoint_parts(
    geometry: Geometry, marks: list[tuple[int, ...]], kept: dict[int, SavedCells], whole: bool = True
) -> list[Part]:
    """CKPT, KEPT and KROW. marks: of each checkpoint sequence, position, and what each window has lost."""
    contents = struct.pack("<II", len(marks), 8 + 4 * len(kept))
    contents += b"".join(struct.pack(f"<I{1 + len(kept)}i", *mark) for mark in marks)
    parts = [Part(b"CKPT", contents, flags=0)]
    for index, cells in kept.items():
        front = struct.pack("<IIQ", whole, cells.seq.shape[1], len(cells.pos))
        parts.append(Part(b"KEPT", front + table_of(cells), index, flags=0))
    parts += [Part(b"KROW", cells.rows.tobytes(), index, flags=0) for index, cells in kept.items()]
    return parts


def changed(part: Part, offset: int, form: str, *values: int) -> Part:
    """The section with other numbers in its contents, and a checksum that fits them."""
    contents = bytearray(part.contents)
    struct.pack_into(form, contents, offset, *values)
    return replace(part, contents=bytes(contents))


# ---- format 1 ----


def format_1(geometry: Geometry, state: SavedState) -> bytearray:
    """What pykvgraph wrote when there was one group of cells."""
    (group,), (cells,) = geometry.groups, state.groups
    table, rows = table_of(cells), cells.rows.tobytes()
    n_cells, n_seq = cells.seq.shape
    blob = bytearray(V1_HEADER)
    blob[0:8] = b"KVGSTATE"
    struct.pack_into("<I", blob, 8, 1)
    struct.pack_into("<I", blob, 12, 112)
    struct.pack_into("<Q", blob, 16, V1_HEADER + len(table) + len(rows))
    blob[24:40] = geometry.model
    struct.pack_into("<I", blob, 40, len(group.layers))
    struct.pack_into("<I", blob, 44, group.n_head_kv)
    struct.pack_into("<I", blob, 48, group.head_dim_k)
    struct.pack_into("<I", blob, 52, group.head_dim_v)
    struct.pack_into("<I", blob, 56, group.type_k)
    struct.pack_into("<I", blob, 60, group.type_v)
    struct.pack_into("<Q", blob, 64, group.cell_bytes)
    struct.pack_into("<I", blob, 72, int(state.whole))
    struct.pack_into("<I", blob, 76, n_seq)
    struct.pack_into("<Q", blob, 80, n_cells)
    struct.pack_into("<Q", blob, 88, digest(table))
    struct.pack_into("<Q", blob, 96, digest(rows))
    return sign_1(blob + table + rows)


def sign_1(blob: bytearray) -> bytearray:
    """The header's checksum of format 1, as somebody would set it who forges one."""
    struct.pack_into("<Q", blob, V1_CHECKSUM_AT, digest(blob[:V1_CHECKSUM_AT]))
    return blob

"""Frames, byte by byte, against the table in frame.py."""

from __future__ import annotations

import io
import random

import pytest
import xxhash

from pykvgraph.stream.transports.frame import (
    HEADER_BYTES,
    FrameError,
    FrameHeader,
    check_part,
    frames,
    read_header,
    read_region,
)

PART = 512 * 1024


def parts_of(key: str, region: bytes) -> list[tuple[bytes, bytes]]:
    return [(header, bytes(part)) for header, part in frames(key, memoryview(region))]


def test_the_bytes_are_those_of_the_table() -> None:
    region = random.Random(0).randbytes(PART + 3)
    for i, (header, part) in enumerate(parts_of("layer0/k", region)):
        begin = i * PART
        assert part == region[begin : begin + PART]
        fields = (
            b"kvgs" + bytes([1, 8, 0, 0]) + len(region).to_bytes(8, "little") + begin.to_bytes(8, "little")
        )
        fields += b"layer0/k" + bytes(112)
        assert header == fields + xxhash.xxh3_128_digest(fields + part)
        assert len(header) == HEADER_BYTES == 160
        assert read_header(header) == FrameHeader("layer0/k", len(region), begin)
        check_part(header, memoryview(part))
    assert i == 1


@pytest.mark.parametrize(("n_bytes", "n_frames"), [(0, 1), (1, 1), (PART, 1), (PART + 1, 2), (2 * PART, 2)])
def test_how_many(n_bytes: int, n_frames: int) -> None:
    found = parts_of("k", bytes(n_bytes))
    assert [len(part) for _, part in found][:-1] == [PART] * (n_frames - 1)
    assert sum(len(part) for _, part in found) == n_bytes
    assert [read_header(header).end - read_header(header).begin for header, _ in found] == [
        len(part) for _, part in found
    ]


def test_every_changed_bit_is_seen() -> None:
    ((header, part),) = parts_of("k", b"part")
    for bit in range(8 * (len(header) + len(part))):
        changed = bytearray(header + part)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            read_header(changed[:HEADER_BYTES])
            check_part(changed[:HEADER_BYTES], memoryview(changed)[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"http", "what came is no frame"),
        (4, b"\2", "a frame of version 2 came, and version 1 is known here"),
        (5, b"\0", "a frame with a damaged key came"),
        (5, b"\xff", "a frame with a damaged key came"),
        (6, b"\1", "a frame with a damaged key came"),
        (16, b"\1", "a frame came that begins at byte 1 of 4"),
        (18, b"\x08", "a frame came that begins at byte 524288 of 4"),
        (24, b"\n", "a frame with a damaged key came"),
        (30, b"k", "a frame with a damaged key came"),
    ],
)
def test_heads_that_are_wrong(at: int, value: bytes, said: str) -> None:
    ((header, _),) = parts_of("k", b"part")
    with pytest.raises(FrameError, match=f"^{said}$"):
        read_header(header[:at] + value + header[at + len(value) :])


def test_parts_that_do_not_follow() -> None:
    """Each is right by itself: one left out, one twice, or one of another region of the same size."""
    one, other = (parts_of(key, key.encode() * (2 * PART + 10)) for key in ("k", "j"))
    assert read(one) == b"k" * (2 * PART + 10)
    for wrong, said in (
        (one[1:], "a region came that begins at byte 524288"),
        ([one[0], one[2]], "of region 'k' another part came than that at byte 524288"),
        ([one[0], one[0], *one[1:]], "of region 'k' another part came than that at byte 524288"),
        ([*one[:2], other[2]], "of region 'k' another part came than that at byte 1048576"),
        (one[:2], "region 'k' came in part only"),
        ([], "nothing"),
    ):
        with pytest.raises(FrameError, match=f"^{said}$"):
            read(wrong)


def read(sent: list[tuple[bytes, bytes]]) -> bytes:
    source, into = io.BytesIO(b"".join(header + part for header, part in sent)), bytearray(2 * PART + 10)

    def fill(view: memoryview, what: str) -> None:
        if source.readinto(view) < view.nbytes:
            raise FrameError(what)

    read_region(fill, "nothing", lambda header: memoryview(into))
    return bytes(into)

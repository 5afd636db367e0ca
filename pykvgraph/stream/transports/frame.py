"""How a region looks on its way: frames of a fixed header and at most 512 KiB of the region.

| bytes | what |
|---|---|
| 4 | `kvgs` |
| 1 | the version, 1 |
| 1 | bytes of the key |
| 2 | 0 |
| 8 | bytes of the whole region, little-endian as all numbers are |
| 8 | where in the region this part begins: a multiple of 512 KiB |
| 120 | the key, and zeros |
| 16 | XXH3 of the 144 bytes before it and of the part |

The part follows: what is left of the region, 512 KiB at most. Each byte from the other end is hostile until
`read_region` has returned.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import xxhash

from pykvgraph.stream.transports.transport import KEY

VERSION = 1
MAGIC = b"kvgs"
PART_BYTES = 512 << 10
_FIELDS = struct.Struct("<4sBB2xQQ120s")
HEADER_BYTES = _FIELDS.size + 16


class FrameError(Exception):
    """What came is no frame, or not the one that must come here."""


class FrameHeader(NamedTuple):
    """What a frame says of its part. n_bytes: of the whole region. begin: where in it the part lies."""

    key: str
    n_bytes: int
    begin: int

    @property
    def end(self) -> int:
        return min(self.begin + PART_BYTES, self.n_bytes)


def frames(key: str, region: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """The headers and parts of a region, in their order. A region without bytes is one frame."""
    name = key.encode("ascii")
    for begin in range(0, region.nbytes or 1, PART_BYTES):
        part = region[begin : begin + PART_BYTES]
        fields = _FIELDS.pack(MAGIC, VERSION, len(name), region.nbytes, begin, name)
        yield fields + _digest(fields, part), part


def framed_bytes(n_bytes: int) -> int:
    """What the frames of a region of that size take."""
    return n_bytes + max(1, -(-n_bytes // PART_BYTES)) * HEADER_BYTES


def read_header(raw: bytes | bytearray) -> FrameHeader:
    """raw: HEADER_BYTES. Raises FrameError."""
    return _read_fields(bytes(raw[: _FIELDS.size]))


@lru_cache(maxsize=64)  # those of one key and size are alike
def _read_fields(raw: bytes) -> FrameHeader:
    magic, version, length, n_bytes, begin, name = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError("what came is no frame")
    if version != VERSION:
        raise FrameError(f"a frame of version {version} came, and version {VERSION} is known here")
    key = name[:length].decode("latin-1")
    if raw[6:8] != bytes(2) or any(name[length:]) or not KEY.fullmatch(key):
        raise FrameError("a frame with a damaged key came")
    if begin % PART_BYTES or begin > max(0, n_bytes - 1):
        raise FrameError(f"a frame came that begins at byte {begin} of {n_bytes}")
    return FrameHeader(key, n_bytes, begin)


def check_part(raw: bytes | bytearray, part: memoryview) -> None:
    """Compares the digest in a header with what has come. Raises FrameError."""
    if _digest(raw[: _FIELDS.size], part) != raw[_FIELDS.size :]:
        raise FrameError("a frame came damaged: its checksum is wrong")


def read_region(
    read: Callable[[memoryview, str], None], what: str, place: Callable[[FrameHeader], memoryview]
) -> FrameHeader:
    """Reads a region, and tells what it was.

    read: fills a buffer, or raises an error with these words, which say what is missing then. what: the words
    for a region that has not begun. place: where this one shall go. Raises FrameError, and what these raise.
    """
    raw = bytearray(HEADER_BYTES)
    read(memoryview(raw), what)
    first = header = read_header(raw)
    if first.begin != 0:
        raise FrameError(f"a region came that begins at byte {first.begin}")
    into, what = place(first), f"region {first.key!r} came in part only"
    while True:
        part = into[header.begin : header.end]
        read(part, what)
        check_part(raw, part)
        if header.end == first.n_bytes:
            return first
        expected = first._replace(begin=header.end)
        read(memoryview(raw), what)
        header = read_header(raw)
        if header != expected:
            raise FrameError(f"of region {first.key!r} another part came than that at byte {expected.begin}")


def _digest(fields: bytes | bytearray, part: memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(part)
    return digest.digest()

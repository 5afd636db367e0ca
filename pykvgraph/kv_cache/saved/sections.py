"""The container of format 2: a header, then sections, each with a head that says what it holds.

Knows nothing of what is in a section, but which tags there are (docs/state-format.md).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.ctypeslib import as_array  # numpy imports it when first used: a child forked meanwhile would wait

from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.source import Source

MAGIC = b"KVGSTATE"
VERSION = 2
MAX_SECTIONS = 1 << 16

MODL, CELL, LOST, ROWS = b"MODL", b"CELL", b"LOST", b"ROWS"
STAT = b"STAT"
CKPT, KEPT, KROW = b"CKPT", b"KEPT", b"KROW"
PEND = b"PEND"
_OPTIONAL = (CKPT, KEPT, KROW, PEND)
_WRITTEN = (MODL, CELL, LOST, ROWS, STAT, *_OPTIONAL)  # in this order
_PLANNED = {
    b"TOKN": "the tokens themselves",
    b"SMPL": "a sampler",
}

_HEADER = struct.Struct("<8sIIQII")  # magic, version, header bytes, total bytes, number of sections, 0
# tag, flags, index, 0, bytes of the contents, their checksum
_HEAD = struct.Struct("<4sIIIQQ")
_CHECKSUM = struct.Struct("<Q")  # of all that stands before it in the header or the head
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
HEAD_BYTES = _HEAD.size + _CHECKSUM.size
_REQUIRED = 1

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


@dataclass(frozen=True)
class Section:
    """A section's place among the bytes. `index`: of the group that it belongs to, 0 where there is none."""

    tag: bytes
    index: int
    offset: int  # of its contents
    n_bytes: int
    checksum: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"section {self.tag.decode('ascii', 'backslashreplace')} {self.index}"


class Writer:
    """A blob whose sections are written in place: their sizes are known first, their contents follow."""

    def __init__(self, sections: Sequence[tuple[bytes, int, int]]) -> None:
        """sections: tag, index and bytes of each, in their order."""
        self._sections = []
        end = HEADER_BYTES
        for tag, index, n_bytes in sections:
            self._sections.append(Section(tag, index, end + HEAD_BYTES, n_bytes))
            end += HEAD_BYTES + n_bytes + _padding(n_bytes)
        self._blob, self._place = _unwritten(end)

    def place(self, tag: bytes, index: int) -> npt.NDArray[np.uint8]:
        """Where a section's contents go: all of them must be written."""
        section = next(known for known in self._sections if (known.tag, known.index) == (tag, index))
        return self._place[section.offset : section.offset + section.n_bytes]

    def write(self, tag: bytes, index: int, contents: bytes) -> None:
        """Writes contents that are there already."""
        self.place(tag, index)[:] = np.frombuffer(contents, np.uint8)

    def finish(self) -> bytes:
        """Header, heads and checksums; the blob."""
        for section in self._sections:
            checksum = xxhash.xxh3_64_intdigest(self.place(section.tag, section.index).data)
            flags = _flags(section.tag)
            head = _signed(_HEAD.pack(section.tag, flags, section.index, 0, section.n_bytes, checksum))
            self._put(section.offset - HEAD_BYTES, head)
            self._put(section.offset + section.n_bytes, bytes(_padding(section.n_bytes)))
        header = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, len(self._blob), len(self._sections), 0)
        self._put(0, _signed(header))
        return self._blob

    def _put(self, offset: int, data: bytes) -> None:
        self._place[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


def _padding(n_bytes: int) -> int:
    return -n_bytes % 8


def _signed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def _unwritten(n_bytes: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """Bytes to be written before anybody else sees them, as PyBytes_FromStringAndSize allows: a copy less."""
    blob: bytes = _new_bytes(None, n_bytes)
    place = (ctypes.c_uint8 * n_bytes).from_address(_address_of(blob))
    return blob, as_array(place)


class Reader:
    """The sections that this pykvgraph knows. Heads are checked at once, contents when asked for."""

    def __init__(self, source: Source) -> None:
        """Raises StateError for a container that is damaged, or that needs what isn't known here."""
        self._source = source
        header = _checked(source.read(0, HEADER_BYTES), "header")
        _, _, header_bytes, total, n_sections, zero = _HEADER.unpack(header)
        if header_bytes != HEADER_BYTES or zero != 0 or n_sections > MAX_SECTIONS:
            raise StateError(
                f"the saved state has a header of {header_bytes} bytes that tells of {n_sections} sections: "
                "that is no format 2"
            )
        if total != source.size:
            raise StateError(
                f"the saved state has {source.size} bytes, and its header tells of {total}: it is cut off or "
                "damaged; save it again"
            )
        self._known: dict[tuple[bytes, int], Section] = {}
        end = HEADER_BYTES
        for _ in range(n_sections):
            end = self._read_section(end)
        if end != total:
            raise StateError(f"the saved state has {total - end} bytes after its last section")

    def _read_section(self, begin: int) -> int:
        """One section, from its head on; where the next one begins."""
        if begin + HEAD_BYTES > self._source.size:
            raise StateError("the saved state has fewer sections than its header tells of")
        head = _checked(self._source.read(begin, HEAD_BYTES), "section head")
        tag, flags, index, zero, n_bytes, checksum = _HEAD.unpack(head)
        section = Section(tag, index, begin + HEAD_BYTES, n_bytes, checksum)
        end: int = section.offset + n_bytes + _padding(n_bytes)
        if end > self._source.size:
            raise StateError(f"the saved state's {section.name} goes beyond the end: {n_bytes} bytes")
        if flags > _REQUIRED or zero != 0:
            raise StateError(f"the saved state's {section.name} has flags {flags}, which are unknown here")
        if tag in _WRITTEN:
            if flags != _flags(tag):
                no = "not " if flags != _REQUIRED else ""
                raise StateError(f"the saved state's {section.name} is {no}marked as required")
            self._add(section)
        elif flags == _REQUIRED:
            raise StateError(
                f"the saved state's {section.name} holds {_PLANNED.get(tag, 'what is unknown here')}, and "
                "this pykvgraph can't read that; use the one that saved it"
            )
        if any(self._source.read(section.offset + n_bytes, _padding(n_bytes))):
            raise StateError(f"the saved state's {section.name} isn't followed by zeros")
        return end

    def _add(self, section: Section) -> None:
        if (section.tag, section.index) in self._known:
            raise StateError(f"the saved state's {section.name} is there twice")
        last = next(reversed(self._known.values()), None)
        if last and _rank(section) < _rank(last):
            raise StateError(f"the saved state's {section.name} stands behind {last.name}: out of order")
        self._known[section.tag, section.index] = section

    def require_no_more_than(self, n_groups: int, windows: Sequence[int], has_states: bool) -> None:
        """Raises StateError when a section is there that no group has. windows: groups that have one."""
        groups = range(n_groups)
        known: dict[bytes, Sequence[int]] = {MODL: range(1), CELL: groups, LOST: windows, ROWS: groups}
        known |= {CKPT: range(1), KEPT: windows, KROW: windows, STAT: range(int(has_states)), PEND: range(1)}
        for section in self._known.values():
            if section.index not in known[section.tag]:
                raise StateError(
                    f"the saved state has {section.name}, and {n_groups} groups of cells, {len(windows)} of "
                    f"them with a window, and {'a' if has_states else 'no'} recurrent state"
                )

    def has(self, tag: bytes, index: int = 0) -> bool:
        """Whether there is such a section."""
        return (tag, index) in self._known

    def section(self, tag: bytes, index: int = 0) -> Section:
        """Raises StateError when it is missing."""
        section = self._known.get((tag, index))
        if section is None:
            raise StateError(f"the saved state has no {Section(tag, index, 0, 0).name}")
        return section

    def front(self, section: Section, n_bytes: int) -> memoryview:
        """The first bytes of a section, unchecked."""
        if n_bytes > section.n_bytes:
            raise StateError(f"the saved state's {section.name} has {section.n_bytes} bytes, too few")
        return self._source.read(section.offset, n_bytes)

    def contents(self, section: Section) -> memoryview:
        """All bytes of a section, unchecked."""
        return self.front(section, section.n_bytes)

    def checked(self, section: Section) -> memoryview:
        """All bytes of a section, whose checksum is right."""
        contents = self.contents(section)
        if xxhash.xxh3_64_intdigest(contents) != section.checksum:
            raise StateError(
                f"the saved state's {section.name} is damaged: its checksum differs; save it again"
            )
        return contents


def _flags(tag: bytes) -> int:
    return 0 if tag in _OPTIONAL else _REQUIRED


def _rank(section: Section) -> tuple[int, int]:
    return _WRITTEN.index(section.tag), section.index


def _checked(data: memoryview, what: str) -> memoryview:
    """What stands before the checksum, which must be right."""
    front, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    if xxhash.xxh3_64_intdigest(front) != checksum:
        raise StateError(f"the saved state's {what} is damaged: its checksum differs; save it again")
    return front

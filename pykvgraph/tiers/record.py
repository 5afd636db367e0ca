"""A part of a text with its rows as bytes: what it is, checked against all that may be wrong with it.

The layout is described in docs/tiers.md. Bytes from a file are hostile until `unpack` has returned.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import xxhash

from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.cells import SavedState
from pykvgraph.kv_cache.saved.format import unpack as unpack_state
from pykvgraph.kv_cache.saved.geometry import Geometry
from pykvgraph.prefix import block

# gone: somebody has removed it. unreadable: the disk says so. foreign: no record at all. damaged: not the
# bytes that were written. other: the rows of something else. no-room: of memory, or of cells. late: decoding
# would be done by now. device: its rows could not be written
Reason = Literal["gone", "unreadable", "foreign", "damaged", "other", "no-room", "late", "device"]
REASONS: tuple[Reason, ...] = get_args(Reason)


class MissError(Exception):
    """It is decoded instead. Never leaves the engine."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


MAGIC = b"kvgtier\1"
# magic, kind, number of tokens, bytes of the rows, key, parent's key; then the digest of all but itself
_FIXED = struct.Struct("<8sc3xIQ32s32s")
_DIGEST_BYTES = 16
_MOST_TOKENS = block.N_TOKENS
FIXED_BYTES = _FIXED.size + _DIGEST_BYTES  # of a header; its tokens follow
HEADER_BYTES = FIXED_BYTES + block.TOKEN_BYTES * _MOST_TOKENS  # at most


class Name(NamedTuple):
    """A part of a text: its tokens behind a block, 32 bits each.

    kind: block.TOKENS or block.END. begin: the position of its first token.
    """

    kind: bytes
    parent: bytes
    tokens: bytes
    begin: int

    @property
    def key(self) -> bytes:
        """What it is found by."""
        return block.key(self.parent, self.tokens, self.kind)

    @property
    def span(self) -> range:
        """The positions of its tokens."""
        return range(self.begin, self.begin + len(self.tokens) // block.TOKEN_BYTES)


class Record(NamedTuple):
    """A part of a text as bytes.

    header: what it is, and its tokens. rows: a saved state (docs/state-format.md).
    """

    header: bytes
    rows: bytes | memoryview

    @property
    def n_bytes(self) -> int:
        """Of both."""
        return len(self.header) + len(self.rows)


class RecordHeader(NamedTuple):
    """What the first bytes of a record say, unchecked but for the magic."""

    kind: bytes
    parent: bytes
    tokens: bytes


def pack(name: Name, rows: bytes) -> Record:
    """A record that unpack() takes for this name."""
    n_tokens = len(name.tokens) // block.TOKEN_BYTES
    fixed = _FIXED.pack(MAGIC, name.kind, n_tokens, len(rows), name.key, name.parent)
    return Record(fixed + _digest(fixed, name.tokens, rows) + name.tokens, rows)


def split(data: bytes) -> Record:
    """The record in the bytes of a file. Raises MissError for what is no record, or is cut off."""
    if len(data) < FIXED_BYTES or not data.startswith(MAGIC):
        raise MissError("foreign")
    _, _, n_tokens, n_rows, _, _ = _FIXED.unpack_from(data)
    begin = FIXED_BYTES + block.TOKEN_BYTES * n_tokens
    if n_tokens > _MOST_TOKENS or len(data) != begin + n_rows:
        raise MissError("damaged")
    return Record(data[:begin], memoryview(data)[begin:])


def read_header(data: bytes) -> RecordHeader | None:
    """What the first HEADER_BYTES of a file say; None when it is no record."""
    if len(data) < FIXED_BYTES or not data.startswith(MAGIC):
        return None
    _, kind, n_tokens, _, _, parent = _FIXED.unpack_from(data)
    tokens = data[FIXED_BYTES : FIXED_BYTES + block.TOKEN_BYTES * n_tokens]
    is_whole = 0 < n_tokens <= _MOST_TOKENS and len(tokens) == block.TOKEN_BYTES * n_tokens
    return RecordHeader(kind, parent, tokens) if kind in block.KINDS and is_whole else None


def unpack(record: Record, name: Name, geometry: Geometry) -> SavedState:
    """The rows of this part of a text. Raises MissError for anything that isn't what was asked for."""
    state = _unpack(record, name, geometry_of(name.kind, geometry))
    _check_cells(state, name, geometry)
    return state


def unpack_some(record: Record, name: Name, geometry: Geometry) -> SavedState:
    """The rows of some of a text's tokens up to this part's end: the same ones in each group, the first one
    among them. Raises MissError, as unpack() does."""
    state = _unpack(record, name, geometry)
    pos = state.groups[0].pos
    if state.whole or state.checkpoints or state.pending or state.states is not None:
        raise MissError("other")
    is_rising = len(pos) > 0 and pos[0] == 0 and bool((np.diff(pos) > 0).all())
    if not is_rising or pos[-1] >= name.span.stop:
        raise MissError("other")
    for cells in state.groups:
        if not (np.array_equal(cells.pos, pos) and cells.seq.all()) or cells.kept.any():
            raise MissError("other")
    return state


def _unpack(record: Record, name: Name, geometry: Geometry) -> SavedState:
    if check(record, name.key) != (name.kind, name.parent, name.tokens):
        raise MissError("other")
    try:
        return unpack_state(record.rows, geometry)
    except StateError:
        raise MissError("other") from None


def check(record: Record, key: bytes) -> RecordHeader:
    """What a record says of itself: what was written under this key. Raises MissError."""
    fixed, digest = record.header[: _FIXED.size], record.header[_FIXED.size : FIXED_BYTES]
    tokens = record.header[FIXED_BYTES:]
    if digest != _digest(fixed, tokens, record.rows):
        raise MissError("damaged")
    magic, kind, _, _, own_key, parent = _FIXED.unpack(fixed)
    if magic != MAGIC or own_key != key or block.key(parent, tokens, kind) != key:
        raise MissError("other")
    return RecordHeader(kind, parent, tokens)


def geometry_of(kind: bytes, geometry: Geometry) -> Geometry:
    """How the rows of a kind are saved: blocks have no recurrent states."""
    return geometry if kind == block.END else replace(geometry, state_bytes=0)


def _digest(fixed: bytes, tokens: bytes, rows: bytes | memoryview) -> bytes:
    """XXH3, 128 bits."""
    hashed = xxhash.xxh3_128(fixed)
    hashed.update(tokens)
    hashed.update(rows)
    return hashed.digest()


def _check_cells(state: SavedState, name: Name, geometry: Geometry) -> None:
    """Each group has the positions of the tokens; where a window keeps fewer, those up to their end."""
    has_state = state.states is not None and len(state.states.owners) == 1
    if state.whole or state.checkpoints or state.pending:
        raise MissError("other")
    if geometry.state_bytes and name.kind == block.END and not has_state:
        raise MissError("other")
    for cells, group in zip(state.groups, geometry.groups, strict=True):
        n, span = len(cells.pos), name.span
        if n != len(span) or cells.pos[0] != span.start:
            if not group.window or (n and name.kind != block.END):
                raise MissError("other")
            span = range(span.stop - n, span.stop)
        if span.start < 0 or not np.array_equal(cells.pos, np.array(span, np.int32)):
            raise MissError("other")

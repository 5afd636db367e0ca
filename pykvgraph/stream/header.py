"""The first region of each message, of a fixed size: what follows it."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from pykvgraph.errors import StateError
from pykvgraph.stream.transports.transport import Transport

_MAGIC = b"kvgstrm\1"
# magic, kind, in runs?, with a state?, first position, bytes of the table
_HEADER = struct.Struct("<8sBBHqQ")
HEADER_KEY = "front"
TABLE_KEY = "table"
STATE_KEY = "state"


class MessageKind(IntEnum):
    """What a message is about."""

    WHOLE = 1  # a sequence, as it is
    STEP = 2  # tokens at its end: K and V of each layer
    TOKEN = 3  # one token at its end: K of all layers, V of all layers
    END = 4
    TEXT = 5  # tokens that the text has got: at `first`, as its table says
    PART = 6  # rows of some positions, in chunks; the whole of a stream


class MessageHeader(NamedTuple):
    """What a message begins with, and what it says of the regions that follow.

    in_runs: rows come in a region for each run of neighbouring cells, else in one for each of K and V.

    with_state: a region with states of recurrent layers at the sequence's end comes last. first: of STEP and
    TOKEN; the sequence ends before this position now, and what comes follows it. n_bytes: of the table.
    """

    kind: MessageKind
    in_runs: bool = False
    with_state: bool = False
    first: int = 0
    n_bytes: int = 0

    def pack(self) -> bytes:
        """The region."""
        return _HEADER.pack(_MAGIC, self.kind, self.in_runs, self.with_state, self.first, self.n_bytes)

    @classmethod
    def receive(cls, transport: Transport) -> MessageHeader:
        """Raises TransportError, and StateError for what is no header."""
        data = bytearray(_HEADER.size)
        transport.fetch(HEADER_KEY, data)
        magic, kind, in_runs, with_state, first, n_bytes = _HEADER.unpack(data)
        if magic != _MAGIC or kind not in list(MessageKind) or in_runs > 1 or with_state > 1 or first < 0:
            raise StateError(f"what came over {transport.address} is no stream of a cache of this version")
        header = cls(MessageKind(kind), bool(in_runs), bool(with_state), first, n_bytes)
        if not header._can_be():
            raise StateError(f"what came over {transport.address} says what can't be: {header}")
        return header

    def _can_be(self) -> bool:
        if self.first >= 2**31:  # no position is so large
            return False
        if self.kind == MessageKind.END:
            return self == MessageHeader(MessageKind.END)
        if self.kind == MessageKind.TEXT:
            return not self.in_runs and not self.with_state and self.n_bytes % 4 == 0
        if self.kind == MessageKind.WHOLE:
            return self.first == 0 and not self.with_state
        if self.kind == MessageKind.PART:
            return self == MessageHeader(MessageKind.PART, n_bytes=self.n_bytes)
        return self.kind == MessageKind.STEP or (self.n_bytes == 0 and not self.in_runs)

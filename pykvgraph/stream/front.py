"""The first region of each message, of a fixed size: what follows it."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from pykvgraph.errors import StateError
from pykvgraph.stream.transport import Transport

_MAGIC = b"kvgstrm\1"
_FRONT = struct.Struct("<8sIIqQ")  # magic, kind, is it in runs, first position, bytes of the table
_KEY = "front"
TABLE_KEY = "table"


class Kind(IntEnum):
    """Of a message."""

    WHOLE = 1  # a sequence, as it is
    STEP = 2  # tokens at its end
    END = 3


class Front(NamedTuple):
    """in_runs: rows come in a region for each run of neighbouring cells, else in one for each of K and V.

    first: of STEP, the sequence ends before this position now, and what the table tells of follows it.
    n_bytes: of the table.
    """

    kind: Kind
    in_runs: bool = False
    first: int = 0
    n_bytes: int = 0

    def send(self, transport: Transport) -> None:
        """Raises TransportError."""
        transport.flush(_KEY, _FRONT.pack(_MAGIC, self.kind, self.in_runs, self.first, self.n_bytes))

    @classmethod
    def receive(cls, transport: Transport) -> Front:
        """Raises TransportError, and StateError for what is no front."""
        data = bytearray(_FRONT.size)
        transport.fetch(_KEY, data)
        magic, kind, in_runs, first, n_bytes = _FRONT.unpack(data)
        nothing = kind == Kind.END and (in_runs or n_bytes)
        if magic != _MAGIC or kind not in list(Kind) or in_runs > 1 or nothing or first < 0:
            raise StateError(f"what came over {transport.address} is no stream of a cache of this version")
        if first and kind != Kind.STEP:
            raise StateError(f"what came over {transport.address} begins at {first}, and not at 0")
        return cls(Kind(kind), bool(in_runs), first, n_bytes)

"""From an address to an end: which transport, and the checks that all of them share."""

from __future__ import annotations

from pykvgraph.checks import integer, real, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.stream.memory import Memory
from pykvgraph.stream.transport import QUEUE_BYTES, TIMEOUT, Transport

_LONGEST = 86_400.0  # seconds
_FORMS = "memory:NAME"


def open(address: str, *, timeout: float = TIMEOUT, queue_bytes: int = QUEUE_BYTES) -> Transport:
    """One end of a pair.

    address: "memory:NAME", two ends in one process. timeout: seconds that a call waits for the other end.
    queue_bytes: how much of what has come may wait until it is fetched. Raises InvalidArgumentError, and
    TransportError when the other end can't be reached.
    """
    kind = _kind_of(address)
    real(timeout, "timeout", 0.001, _LONGEST)
    integer(queue_bytes, "queue_bytes", 0)
    if kind == "memory":
        return Memory(address, timeout, queue_bytes)
    raise InvalidArgumentError(f"address must be {_FORMS}, got {shown(address)}")


def _kind_of(address: str) -> str:
    """The kind of transport: what stands before the colon."""
    if not isinstance(address, str):
        raise InvalidArgumentError(f"address must be text, {_FORMS}; got {shown(address)}")
    kind, _, name = address.partition(":")
    if not name or "\0" in name:
        raise InvalidArgumentError(f"address must be {_FORMS}, got {shown(address)}")
    return kind

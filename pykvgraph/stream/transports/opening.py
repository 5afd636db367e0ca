"""From an address to an end: which transport, and the checks that all of them share."""

from __future__ import annotations

from pykvgraph.checks import integer, real, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.stream.transports.connection import connect
from pykvgraph.stream.transports.device import DeviceTransport
from pykvgraph.stream.transports.file import FileTransport
from pykvgraph.stream.transports.listener import Listener
from pykvgraph.stream.transports.memory import MemoryTransport
from pykvgraph.stream.transports.mpi import MpiTransport
from pykvgraph.stream.transports.socket_address import SocketAddress, parse_tcp, parse_unix
from pykvgraph.stream.transports.transport import QUEUE_BYTES, TIMEOUT, Transport

_LONGEST = 86_400.0  # seconds
_FORMS = "memory:NAME, device:NAME, file:DIR, unix:PATH, tcp:HOST:PORT or mpi:RANK"


def open(
    address: str, token: str | None = None, *, timeout: float = TIMEOUT, queue_bytes: int = QUEUE_BYTES
) -> Transport:
    """One end of a pair.

    address: "memory:NAME", two ends in one process; "device:NAME", the same, and rows stay on their device;
    "file:DIR", a directory, which is made if it is missing; "unix:PATH" or "tcp:HOST:PORT", where somebody
    listens; "mpi:RANK", of MPI's world, where the other end opens this one's rank. token: what the listener
    was given. timeout: seconds that a call waits for the other end. queue_bytes: how much of what has come
    may wait until it is fetched; files may wait as the disk has room. Raises InvalidArgumentError,
    TransportError when the other end can't be reached, or has another token, and ImportError without mpi4py.
    """
    kind = _kind_of(address)
    _check(timeout, queue_bytes)
    if kind in ("memory", "device", "file", "mpi") and token is not None:
        raise InvalidArgumentError(f"{address} takes no token: nobody connects to it")
    if kind == "memory":
        return MemoryTransport(address, timeout, queue_bytes)
    if kind == "device":
        return DeviceTransport(address, timeout, queue_bytes)
    if kind == "file":
        return FileTransport(address, timeout)
    if kind == "mpi":
        return MpiTransport(address, timeout, queue_bytes)
    return connect(_parse(kind, address), address, _key_of(token), timeout, queue_bytes)


def listen(
    address: str, token: str | None = None, *, timeout: float = TIMEOUT, queue_bytes: int = QUEUE_BYTES
) -> Listener:
    """Waits for others that `open` the same address; each of them is a pair with what `accept` returns.

    address: "unix:PATH", which only this user can open; "tcp:PORT", only this machine; "tcp:HOST:PORT", which
    needs a token unless HOST is this machine. Port 0: one that is free; see the listener's `address`. token:
    who doesn't know it is refused; `secrets.token_hex(32)` makes one. timeout, queue_bytes: as for `open`, of
    each end. Raises InvalidArgumentError, and TransportError when the address can't be had.
    """
    kind = _kind_of(address)
    _check(timeout, queue_bytes)
    at, key = _parse(kind, address), _key_of(token)
    if not key and not at.is_local:
        raise InvalidArgumentError(f"{address} is open to other machines, so it needs a token")
    return Listener(at, address, key, timeout, queue_bytes)


def _check(timeout: float, queue_bytes: int) -> None:
    real(timeout, "timeout", 0.001, _LONGEST)
    integer(queue_bytes, "queue_bytes", 0)


def _kind_of(address: str) -> str:
    """The kind of transport: what stands before the colon."""
    if not isinstance(address, str):
        raise InvalidArgumentError(f"address must be text, {_FORMS}; got {shown(address)}")
    kind, _, name = address.partition(":")
    if not name or "\0" in name:
        raise _no_address(address)
    return kind


def _parse(kind: str, address: str) -> SocketAddress:
    if kind == "unix":
        return parse_unix(address)
    if kind == "tcp":
        return parse_tcp(address)
    raise _no_address(address)


def _no_address(address: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"address must be {_FORMS}, got {shown(address)}")


def _key_of(token: str | None) -> bytes:
    """The bytes that proofs are made with; none without a token."""
    if token is None:
        return b""
    if not isinstance(token, str) or not token:
        raise InvalidArgumentError("token must be text, and not empty; None is for no token")
    try:
        return token.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError("token must be text that UTF-8 can hold") from None

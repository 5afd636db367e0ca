"""Addresses of sockets: "tcp:HOST:PORT", "tcp:PORT" for this machine alone, and "unix:PATH"."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError, TransportError

_LOOPBACK = "127.0.0.1"
_PATH_BYTES = 107  # that a socket's address has room for


class SocketAddress(NamedTuple):
    """where: what bind() and connect() take."""

    family: socket.AddressFamily
    where: str | tuple[str, int]

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if isinstance(self.where, str):
            return True
        return ipaddress.ip_address(self.where[0].partition("%")[0]).is_loopback


def parse_unix(address: str) -> SocketAddress:
    path = address.partition(":")[2]
    try:
        n_bytes = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"the path of {shown(address)} is no text") from None
    if n_bytes > _PATH_BYTES:
        raise InvalidArgumentError(
            f"the path of {shown(address)} has {n_bytes} bytes, and a socket's has {_PATH_BYTES} at most"
        )
    return SocketAddress(socket.AF_UNIX, path)


def parse_tcp(address: str) -> SocketAddress:
    """Looks up the host. Raises InvalidArgumentError, and TransportError for a host that nobody knows."""
    host, _, port = address.partition(":")[2].rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or _LOOPBACK
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 65536):
        raise InvalidArgumentError(
            f"address must be tcp:HOST:PORT with a port up to 65535, got {shown(address)}"
        )
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"{address}: the host {host!r} is not known ({error}); name another") from None
    family, _, _, _, where = found[0]
    return SocketAddress(family, (str(where[0]), int(where[1])))

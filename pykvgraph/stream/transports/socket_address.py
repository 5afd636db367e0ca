"""Addresses of sockets: "tcp:HOST:PORT", "tcp:PORT" for this machine alone, and "unix:PATH"."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError, TransportError

_EVERYONE_WAITS = 0.01  # seconds between two tries for the folder


class BoundPath:
    """Binds a socket, and listens. What is left of a listener that died makes way. Raises OSError."""

    def __init__(self, listening: socket.socket, path: str, timeout: float) -> None:
        self.path = path
        os.fchmod(listening.fileno(), 0o600)  # what bind() makes has this mode from the start
        with _folder_locked(path, timeout):
            if _is_left_over(path):
                os.unlink(path)
            listening.bind(path)
            self._made = os.lstat(path)
            listening.listen()

    def remove(self) -> None:
        """Unless somebody else has put something there."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self.path), self._made):
                os.unlink(self.path)


@contextlib.contextmanager
def _folder_locked(path: str, timeout: float) -> Iterator[None]:
    """So that of two that find the same leftover, one doesn't remove what the other one has just made."""
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_EVERYONE_WAITS)
        yield
    finally:
        os.close(folder)


def _is_left_over(path: str) -> bool:
    """Whether a socket is there at which nobody listens. Anything else is an OSError when it is bound."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


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

"""The end that connects."""

from __future__ import annotations

import socket
import time

from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.connection import Connection
from pykvgraph.stream.transports.frame import FrameError
from pykvgraph.stream.transports.hello import CHALLENGE_BYTES, WELCOME_BYTES, ConnectorSide
from pykvgraph.stream.transports.socket_address import SocketAddress


def connect(to: SocketAddress, address: str, token: bytes, timeout: float, queue_bytes: int) -> Connection:
    """Raises TransportError when nobody listens there, or somebody who doesn't know the token."""
    try:
        connected = socket.socket(to.family, socket.SOCK_STREAM)
    except OSError as error:  # too many files are open
        raise TransportError(f"{address}: {_explained(error, timeout)}") from None
    try:
        deadline = time.monotonic() + timeout
        connected.settimeout(timeout)
        connected.connect(to.where)
        side = ConnectorSide(token)
        connected.sendall(side.answer(_read(connected, CHALLENGE_BYTES, deadline)))
        side.check(_read(connected, WELCOME_BYTES, deadline))
        return Connection(connected, address, timeout, queue_bytes)
    except BaseException as error:
        connected.close()
        if isinstance(error, (OSError, FrameError)):
            raise TransportError(f"{address}: {_explained(error, timeout)}") from None
        raise


def _read(connected: socket.socket, n_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < n_bytes:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        more = connected.recv(n_bytes - len(data))
        if not more:
            raise FrameError("it closed the connection")
        data += more
    return data


def _explained(error: OSError | FrameError, timeout: float) -> str:
    if isinstance(error, FrameError):
        return f"the listener refused, or is not ours ({error}); give both ends the same token and version"
    if isinstance(error, TimeoutError):
        return f"the listener has not answered for {timeout:g} s; see whether it waits in accept()"
    return f"nobody can be reached there ({error.strerror}); start the end that listens first"

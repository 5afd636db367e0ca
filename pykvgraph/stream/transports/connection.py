"""Frames over a socket, of TCP or of a path."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.frame import FrameError
from pykvgraph.stream.transports.framed import FramedTransport
from pykvgraph.stream.transports.hello import CHALLENGE_BYTES, WELCOME_BYTES, ConnectorSide
from pykvgraph.stream.transports.pieces import Pieces, behind, size_of
from pykvgraph.stream.transports.socket_address import SocketAddress


def connect(
    to: SocketAddress, address: str, token: bytes, timeout: float, queue_bytes: int
) -> SocketTransport:
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
        return SocketTransport(connected, address, timeout, queue_bytes)
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


# so that a sender computes its checksums while the receiver copies; TCP makes its buffers as large as needed
_UNIX_BUFFER_BYTES = 1 << 20


class SocketTransport(FramedTransport):
    """One end of a connected socket, which it closes. Both ends have proved that they know the token."""

    def __init__(self, connected: socket.socket, address: str, timeout: float, queue_bytes: int) -> None:
        super().__init__(address, timeout, queue_bytes)
        self._socket = connected
        self._using = threading.Lock()  # held while the descriptor is shut down or closed
        _set_timeout(connected, timeout)
        if connected.family == socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        super().close()
        with (
            self._sending,
            self._receiving,
            self._using,
        ):  # a closed descriptor's number may be given to another file
            self._socket.close()

    def _shut(self) -> None:
        with self._using, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self, pieces: Pieces) -> None:
        try:
            n_sent = self._socket.sendmsg(pieces)
            if n_sent < size_of(pieces):
                self._write_rest(behind(pieces, n_sent))
        except OSError as error:
            raise self._explained(error, f"the other end has taken nothing for {self.timeout:g} s") from None

    def _write_rest(self, pieces: Pieces) -> None:
        deadline = time.monotonic() + self.timeout
        while pieces := behind(pieces, self._socket.sendmsg(pieces)):
            if time.monotonic() > deadline:
                raise TimeoutError

    def _read(self, into: memoryview, what: str) -> None:
        n_read, deadline = 0, 0.0
        try:
            while n_read < into.nbytes:
                n_more = self._socket.recv_into(into[n_read:] if n_read else into)
                if n_more == 0:
                    raise ConnectionError
                n_read += n_more
                if n_read < into.nbytes:
                    deadline = deadline or time.monotonic() + self.timeout
                    if time.monotonic() > deadline:
                        raise TimeoutError
        except OSError as error:
            raise self._explained(error, f"{what} for {self.timeout:g} s", what) from None

    def _explained(self, error: OSError, stalled: str, also: str = "") -> TransportError:
        if self._ended is not None:
            return self._error(self._ended, "open it anew")
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return self._stalled(stalled)
        what = "the other end is closed" + (f", and {also}" if also else "")
        return self._error(what, "see why it ended, and open both anew")


def _set_timeout(connected: socket.socket, seconds: float) -> None:
    """The kernel's own, after which a call raises BlockingIOError: Python's asks poll() before each call."""
    whole = int(seconds)
    pair = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)) if seconds != whole else 0)
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pair)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pair)

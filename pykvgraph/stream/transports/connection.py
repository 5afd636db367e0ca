"""Frames over a socket, of TCP or of a path."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.framed import Framed

# so that a sender computes its checksums while the receiver copies; TCP makes its buffers as large as needed
_UNIX_BUFFER_BYTES = 1 << 20


class Connection(Framed):
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

    def _write(self, head: bytes, part: memoryview) -> None:
        try:
            n_sent = self._socket.sendmsg((head, part))
            if n_sent < len(head) + part.nbytes:
                self._write_rest(head, part, n_sent)
        except OSError as error:
            raise self._explained(error, f"the other end has taken nothing for {self.timeout:g} s") from None

    def _write_rest(self, head: bytes, part: memoryview, n_sent: int) -> None:
        deadline = time.monotonic() + self.timeout
        while n_sent < len(head) + part.nbytes:
            rest = head[n_sent:] if n_sent < len(head) else part[n_sent - len(head) :]
            n_sent += self._socket.send(rest)
            if time.monotonic() > deadline and n_sent < len(head) + part.nbytes:
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

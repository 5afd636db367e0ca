"""The end that listens. Who connects is heard only until a token is shown, all at the same time."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.connection import SocketTransport
from pykvgraph.stream.transports.frame import FrameError
from pykvgraph.stream.transports.hello import ANSWER_BYTES, ListenerSide
from pykvgraph.stream.transports.socket_address import BoundPath, SocketAddress

if TYPE_CHECKING:
    from typing_extensions import Self

HELLO_SECONDS = 5.0  # for a stranger to show the token
_MOST_STRANGERS = 64
_SLICE = 0.05  # seconds until accept() sees that it was closed
_log = logging.getLogger("pykvgraph")


class _Stranger:
    """A connection whose answer has not come as a whole."""

    def __init__(self, connected: socket.socket, token: bytes) -> None:
        self.socket = connected
        self.side = ListenerSide(token)
        self.heard = b""
        self.deadline = time.monotonic() + HELLO_SECONDS
        connected.setblocking(False)
        connected.send(self.side.challenge())  # a new connection has room for it

    def hear(self) -> bool:
        """Whether it is known now. Raises FrameError and OSError."""
        more = self.socket.recv(ANSWER_BYTES - len(self.heard))
        if not more:
            raise FrameError("it went away")
        self.heard += more
        if len(self.heard) < ANSWER_BYTES:
            return False
        self.socket.send(self.side.welcome(self.heard))
        return True


class Listener:
    """Takes connections at an address. One thread calls `accept`; another one may close it.

    address: as `stream.open` takes it, with the port that was found for port 0.
    """

    def __init__(
        self, at: SocketAddress, address: str, token: bytes, timeout: float, queue_bytes: int
    ) -> None:
        self.timeout = timeout
        self._token, self._queue_bytes = token, queue_bytes
        self._is_closed = False
        self._refused = ""  # why the last stranger was sent away
        self._lock = threading.Lock()  # of what close() closes
        self._known: deque[socket.socket] = deque()
        self._socket = socket.socket(at.family, socket.SOCK_STREAM)
        try:
            self._path = self._bind(at)
        except OSError as error:
            self._socket.close()
            why = f"nobody can listen there ({error.strerror})"
            raise TransportError(f"{address}: {why}; end who does, or name another address") from None
        self._socket.setblocking(False)
        self.address = address if self._path else _tcp_address(self._socket)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def _bind(self, at: SocketAddress) -> BoundPath | None:
        if isinstance(at.where, str):
            return BoundPath(self._socket, at.where, self.timeout)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(at.where)
        self._socket.listen()
        return None

    def accept(self) -> SocketTransport:
        """The next end that connects and knows the token.

        Others are sent away, with a warning of the logger `pykvgraph`. Raises TransportError when none has
        come for `timeout` seconds, or when this is closed.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            with self._lock:
                if self._is_closed:
                    raise TransportError(f"{self.address}: it was closed here; listen anew")
                left = deadline - time.monotonic()
                self._hear(max(0.0, min(_SLICE, left)))
                if self._known:
                    return SocketTransport(
                        self._known.popleft(), self.address, self.timeout, self._queue_bytes
                    )
            if left <= 0:
                nobody = f"nobody with the token has connected for {self.timeout:g} s{self._refused}"
                advice = "start the other end, with this address and the same token"
                raise TransportError(f"{self.address}: {nobody}; {advice}")

    def close(self) -> None:
        """Listens no more. Connections that were accepted stay."""
        self._is_closed = True
        with self._lock:
            if self._selector.get_map() is None:
                return
            for waiting in (*self._known, *(stranger.socket for stranger in self._strangers())):
                waiting.close()
            self._selector.close()
            self._socket.close()
            if self._path is not None:
                self._path.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self, seconds: float) -> None:
        """What has come until then, from whoever it is."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._let_in()
            else:
                self._listen_to(key.data)
        now = time.monotonic()
        for stranger in self._strangers():
            if now > stranger.deadline:
                self._send_away(stranger, f"it showed no token for {HELLO_SECONDS:g} s")

    def _strangers(self) -> list[_Stranger]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _let_in(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:
            what = f"a connection can't be taken ({error.strerror})"
            raise TransportError(
                f"{self.address}: {what}; close other files, or allow more of them"
            ) from None
        strangers = self._strangers()
        if len(strangers) >= _MOST_STRANGERS:
            oldest = min(strangers, key=lambda each: each.deadline)
            self._send_away(oldest, "others came, and it showed no token")
        try:
            stranger = _Stranger(connected, self._token)
        except OSError:
            connected.close()
        else:
            self._selector.register(connected, selectors.EVENT_READ, stranger)

    def _listen_to(self, stranger: _Stranger) -> None:
        try:
            if stranger.hear():
                self._selector.unregister(stranger.socket)
                self._known.append(stranger.socket)
        except (OSError, FrameError) as error:
            self._send_away(stranger, str(error))

    def _send_away(self, stranger: _Stranger, why: str) -> None:
        self._refused = f" (the last that came was refused: {why})"
        _log.warning("%s: a connection was refused: %s", self.address, why)
        self._selector.unregister(stranger.socket)
        stranger.socket.close()


def _tcp_address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"

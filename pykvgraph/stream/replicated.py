"""A text whose every step goes to a peer too, which goes on when this process is gone: `replicated`."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from pykvgraph.checks import real
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError, TransportError
from pykvgraph.stream.follow import following
from pykvgraph.stream.layout import Layout

if TYPE_CHECKING:
    from typing_extensions import Self

ACK_KEY = "ack"
ACK = struct.Struct("<qq")  # tokens of the text, the last position; both -1: it was the last one
TIMEOUT = 10.0  # seconds
LEVEL = 3  # send() waits for nobody
_log = logging.getLogger("pykvgraph")


class _Step(NamedTuple):
    """What was sent, and when."""

    n_text: int
    last: int
    at: float


def replicated(
    ctx: Context, seq: int, layout: Layout, text: Sequence[int] = (), timeout: float = TIMEOUT
) -> Replicated:
    """Sends a sequence and its text to `replica` at the other end, and from then on each step of it.

    text: the tokens that are known, a prompt. timeout: seconds that the peer may take to acknowledge a step.
    The layout's transports must have a longer timeout of their own, one that no pause of the text reaches:
    theirs ends them for good. Acknowledgements come back over the first of them.

    Raises what `following` raises. Later nothing raises because of the peer: when it is gone or too late, the
    text goes on without one, and `error` says why.
    """
    return Replicated(ctx, seq, layout, text, timeout)


class Replicated:
    """What `replicated` returns.

    error: why there is no copy any more, None while there is. n_acknowledged: with how many tokens of the
    text the peer can go on; those that it has not decoded yet, it knows.
    """

    def __init__(self, ctx: Context, seq: int, layout: Layout, text: Sequence[int], timeout: float) -> None:
        self._timeout = real(timeout, "timeout", 0.001, 86_400)
        if min(transport.timeout for transport, _ in layout.parts) <= self._timeout:
            raise InvalidArgumentError(
                f"a transport must have a longer timeout than the replica's {self._timeout:g} s"
            )
        self.error: TransportError | None = None
        self.n_acknowledged = 0
        self._ctx, self._seq, self._layout = ctx, seq, layout
        self._n_text = len(text)
        self._waiting: deque[_Step] = deque()
        self._changed = threading.Condition()
        self._is_over = False
        self._out = following(ctx, seq, layout, LEVEL, text=text)
        self._note()
        self._thread = threading.Thread(target=self._hear, name="pykvgraph acknowledged", daemon=True)
        self._thread.start()

    def send(self, said: Sequence[int] = ()) -> None:
        """What the last decode has added, and the tokens chosen after it; call it after each decode.

        said: all that the text has got since the last call. With greedy or seeded sampling the peer goes on
        with the tokens that would have come here. Doesn't wait for the peer. Raises InvalidArgumentError as
        `following`'s send().
        """
        if self._is_over:
            return
        try:
            if self.error is not None:
                raise self.error
            with self._changed:
                late = self._waiting and time.monotonic() - self._waiting[0].at > self._timeout
            if late:
                raise self._late()
            self._n_text += len(said)
            self._note()
            self._out.send(said)
        except TransportError as error:
            self._lose(error)

    def close(self) -> None:
        """Waits, within `timeout`, until the peer has acknowledged all, and ends the copy."""
        if self._is_over:
            return
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting or self.error is not None, self._timeout)
            if self.error is not None:
                raise self.error
            if self._waiting:
                raise self._late()
            self._out.end()
            self._thread.join(self._timeout)
            if self._thread.is_alive():
                raise self._late()
        except TransportError as error:
            self._lose(error)
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._is_over:
            self._end()

    def _note(self) -> None:
        """What is about to be sent."""
        with self._changed:
            step = _Step(self._n_text, self._ctx.kv.seq_pos_max(self._seq), time.monotonic())
            self._waiting.append(step)

    def _hear(self) -> None:
        """The thread that takes acknowledgements: of a step, or of a later one."""
        transport = self._layout.parts[0][0]
        ack = bytearray(ACK.size)
        try:
            while True:
                transport.fetch(ACK_KEY, ack)
                n_text, last = ACK.unpack(ack)
                if n_text < 0:
                    return
                with self._changed:
                    self._take(n_text, last)
        except TransportError as error:
            with self._changed:
                self.error = self.error or error
                self._changed.notify_all()

    def _take(self, n_text: int, last: int) -> None:
        while self._waiting:
            step = self._waiting[0]
            if step.n_text > n_text or (step.n_text == n_text and step.last != last):
                return
            self.n_acknowledged = step.n_text
            self._waiting.popleft()
        self._changed.notify_all()

    def _late(self) -> TransportError:
        address = self._layout.parts[0][0].address
        return TransportError(
            f"{address}: the peer has acknowledged nothing for {self._timeout:g} s; see what it does, and "
            "begin a new copy"
        )

    def _lose(self, error: TransportError) -> None:
        with self._changed:
            self.error = self.error or error
        _log.warning("the text goes on without a copy: %s", self.error)
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._layout.close()
        self._out.abandon()
        self._thread.join()

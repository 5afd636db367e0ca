"""Frames as messages of MPI, between two ranks of one world: buffers, never pickles.

mpi4py is an optional dependency, and is imported when an end is opened: that starts MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.stream.transports.framed import FramedTransport
from pykvgraph.stream.transports.pieces import Pieces

_FRAME, _BYE = 0, 1  # what a message is
_N_TAGS = 2  # of a session
_N_SESSIONS = 16_383  # then their tags come again; MPI promises tags up to 32,767
_EAGER_TRIES = 500
_SHORTEST, _LONGEST = 0.00002, 0.001  # seconds between two tries, later

_opening = threading.Lock()
_n_opened: dict[int, int] = {}  # ends that this process has opened to each rank
_unfinished: list[Any] = []  # sends that nobody took: MPI may still read their buffers


class MpiTransport(FramedTransport):
    """The n-th end that a rank opens to another one is a pair with the n-th that this one opens to it."""

    def __init__(self, address: str, timeout: float, queue_bytes: int) -> None:
        super().__init__(address, timeout, queue_bytes)
        self._mpi = mpi = _start()
        self._world = mpi.COMM_WORLD
        self._rank = _rank_of(address, self._world.Get_size())
        with _opening:
            session = _n_opened.get(self._rank, 0)
            _n_opened[self._rank] = session + 1
        self._tag = session % _N_SESSIONS * _N_TAGS

    def _write(self, pieces: Pieces) -> None:
        for data in pieces:
            if len(data):
                self._write_message(data)

    def _write_message(self, data: bytes | memoryview) -> None:
        with self._named_errors():
            request = self._world.Isend([data, self._mpi.BYTE], self._rank, self._tag + _FRAME)
            stalled = f"the other end has taken nothing for {self.timeout:g} s"
            self._finish(request, data, stalled, "the other end is closed")

    def _read(self, into: memoryview, what: str) -> None:
        if into.nbytes == 0:
            return
        stalled, closed = f"{what} for {self.timeout:g} s", f"the other end is closed, and {what}"
        with self._named_errors():
            n_bytes = self._wait(self._next_bytes, stalled, closed)
            if n_bytes != into.nbytes:  # it stays where it is: MPI would cut it
                what = f"a message of {n_bytes} bytes came, and one of {into.nbytes} was expected"
                raise self._error(what, "see what the other end is, and that its version is the same")
            request = self._world.Irecv([into, self._mpi.BYTE], self._rank, self._tag + _FRAME)
            self._finish(request, into, stalled, None)

    def _next_bytes(self) -> int | None:
        """The size of the message that has come; None: there is none."""
        status = self._mpi.Status()
        if not self._world.Iprobe(self._rank, self._tag + _FRAME, status):
            return None
        return int(status.Get_count(self._mpi.BYTE))

    def _finish(self, request: Any, data: object, stalled: str, closed: str | None) -> None:
        """Until MPI is done with the data; if it never is, they are kept for it."""
        try:
            self._wait(lambda: request.Test() or None, stalled, closed)
        except BaseException:
            _unfinished.append((request, data))
            raise

    def _wait(self, poll: Callable[[], Any], stalled: str, closed: str | None) -> Any:
        """What poll() returns, as soon as that is something. Raises TransportError.

        closed: what to say if the other end is; None: what it has begun it ends.
        """
        deadline, n_tries, pause = time.monotonic() + self.timeout, 0, _SHORTEST
        while True:
            is_over = closed is not None and self._world.Iprobe(self._rank, self._tag + _BYE)
            found = poll()  # behind the goodbye: what was flushed before it is there
            if found is not None:
                return found
            if self._ended is not None:
                raise self._error(self._ended, "open it anew")
            if is_over:
                raise self._error(str(closed), "see why it ended, and open both anew")
            n_tries += 1
            if n_tries > _EAGER_TRIES:
                if time.monotonic() > deadline:
                    raise self._stalled(stalled)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)

    def _shut(self) -> None:
        with contextlib.suppress(self._mpi.Exception):
            self._world.Isend([b"", self._mpi.BYTE], self._rank, self._tag + _BYE).Free()

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise self._error(f"MPI failed ({error})", "see whether the other rank still runs") from None


def _start() -> Any:
    """MPI, where several threads may call it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no library of MPI
        raise ImportError(f"mpi needs mpi4py and MPI ({error}): pip install 'pykvgraph[mpi]'") from error
    with _opening:
        if not _n_opened:
            atexit.unregister(_take_goodbyes)
            atexit.register(_take_goodbyes)  # behind MPI's own, so it runs before that
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UnsupportedError("this MPI lets one thread call it, and streams use several: use that of mpich")
    return MPI


def _take_goodbyes() -> None:
    """MPI can't end well with messages that nobody took, and mpiexec kills other ranks then."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    for rank, n in _n_opened.items():
        for session in range(min(n, _N_SESSIONS)):
            tag = session * _N_TAGS + _BYE
            while MPI.COMM_WORLD.Iprobe(rank, tag):
                MPI.COMM_WORLD.Recv([bytearray(), MPI.BYTE], rank, tag)


def _rank_of(address: str, n_ranks: int) -> int:
    text = address.partition(":")[2]
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) >= n_ranks:
        world = f"a rank below {n_ranks}, the size of this world"
        advice = "start the processes by mpiexec -n N"
        raise InvalidArgumentError(f"address must be mpi:RANK with {world}, got {shown(address)}; {advice}")
    return int(text)

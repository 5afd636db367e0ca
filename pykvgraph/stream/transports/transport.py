"""What carries regions of bytes from one end to another: the face that all transports share."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, cast

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError, TransportError

if TYPE_CHECKING:
    from typing import Any

    import numpy.typing as npt
    from typing_extensions import Buffer, Self

    Bytes = Buffer | npt.NDArray[Any]  # mypy takes an array for a buffer from Python 3.12 on

TIMEOUT = 30.0  # seconds
QUEUE_BYTES = 256 << 20
KEY = re.compile(r"[A-Za-z0-9_.:=/-]{1,120}")


class Transport(ABC):
    """One end of a pair. What one end flushes under a key, the other one fetches by that key.

    One thread may flush while another one fetches; more of them wait for each other. Regions of the same key
    are fetched in the order in which they were flushed, those of other keys in any order. Whatever raises
    TransportError closes this end for good: nobody can tell what the other end has by then.

    address: as `stream.open` takes it. flushes, bytes_sent: what this end has flushed.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self.flushes = 0
        self.bytes_sent = 0
        self._ended: str | None = None  # why nothing travels any more
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def flush(self, key: str, data: Bytes) -> None:
        """Sends a region; when this returns, the caller may change its bytes.

        key: 1 to 120 letters, digits or any of `_.:=/-`. data: contiguous bytes, none is fine too. Raises
        InvalidArgumentError, and TransportError when the other end is gone or takes nothing for `timeout`
        seconds.
        """
        self.flush_all([(key, data)])

    def flush_all(self, regions: Iterable[tuple[str, Bytes]]) -> None:
        """Sends several regions in their order, with as few appends or sends as the transport needs.

        regions: keys and bytes, as flush() takes them. Raises as flush() does; then some may have been sent.
        """
        checked = []
        for key, data in regions:
            check_key(key)
            checked.append((key, _bytes_of(data, "data")))
        with self._sending, self._ending_on_error():
            self._send_all(checked)
            self.flushes += len(checked)
            self.bytes_sent += sum(view.nbytes for _, view in checked)

    def fetch(self, key: str, into: Bytes) -> None:
        """Waits for the region of that key, and writes it.

        into: contiguous, of exactly the region's size. Raises InvalidArgumentError, and TransportError when
        the other end is gone or sends nothing for `timeout` seconds, when the region has another size or is
        damaged, and when so much waits for other keys that there is no room for more. Part of `into` may
        have been written then.
        """
        check_key(key)
        view = _bytes_of(into, "into")
        if view.readonly:
            raise InvalidArgumentError("into must be writable, got a buffer that can only be read")
        with self._receiving, self._ending_on_error():
            self._receive(key, view)

    def close(self) -> None:
        """Ends it, also for calls that wait in other threads. What was flushed can still be fetched."""
        self._end("it was closed here")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send_all(self, regions: Sequence[tuple[str, memoryview]]) -> None:
        for key, data in regions:
            self._send(key, data)

    @abstractmethod
    def _send(self, key: str, data: memoryview) -> None: ...

    @abstractmethod
    def _receive(self, key: str, into: memoryview) -> None: ...

    @abstractmethod
    def _shut(self) -> None:
        """Wakes those that wait, in this process and at the other end. May be called twice."""

    def _end(self, why: str) -> None:
        if self._ended is None:
            self._ended = why
            self._shut()

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        if self._ended is not None:
            raise self._error(f"nothing travels any more: {self._ended}", "open it anew")
        try:
            yield
        except TransportError as error:
            self._end(str(error).removeprefix(f"{self.address}: "))
            raise
        except BaseException as error:  # Ctrl-C in the middle of a region
            self._end(f"{type(error).__name__} interrupted it")
            raise

    def _error(self, what: str, advice: str) -> TransportError:
        return TransportError(f"{self.address}: {what}; {advice}")

    def _stalled(self, what: str) -> TransportError:
        return self._error(what, "see what the other end does, or give this one a longer timeout")

    def _other_size(self, key: str, n_bytes: int, wanted: int) -> TransportError:
        what = f"region {key!r} has {n_bytes} bytes, and {wanted} were asked for"
        return self._error(what, "both ends must be of the same model and layout")


def check_key(key: str) -> None:
    """Raises InvalidArgumentError."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise InvalidArgumentError(f"key must be 1 to 120 letters, digits or any of _.:=/-, got {shown(key)}")


def _bytes_of(buffer: Bytes, name: str) -> memoryview:
    """Its bytes, in one dimension."""
    try:
        view = memoryview(cast("Buffer", buffer))
    except TypeError:
        raise InvalidArgumentError(f"{name} must be a buffer of bytes, got {shown(buffer)}") from None
    if not view.c_contiguous:
        raise InvalidArgumentError(f"{name} must be contiguous: copy its rows into one buffer first")
    if view.nbytes == 0:  # memoryview.cast refuses a shape with 0 in it
        return memoryview(bytearray())
    return view.cast("B")

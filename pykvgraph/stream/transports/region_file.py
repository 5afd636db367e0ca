"""A file of regions: one end appends to it, and others fetch from it.

A region is a byte, 0 until somebody has fetched it and 255 from then on, and its frames (see `frame`). A
region that isn't whole at the file's end is being written, or its writer is gone. The writer holds a lock
(flock) on the file; whoever gets that lock when all regions have been fetched removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pykvgraph.stream.transports.frame import (
    HEADER_BYTES,
    FrameError,
    FrameHeader,
    framed_bytes,
    frames,
    read_header,
    read_region,
)
from pykvgraph.stream.transports.pieces import behind, gathered, size_of

_WAITS, _FETCHED = b"\0", b"\xff"  # so that no single wrong bit makes one the other
_FULL = 16 << 20  # bytes, behind which a writer begins another file: a file goes when all of it was fetched


class FoundRegion(NamedTuple):
    """A region that nobody has fetched, and where in its file it begins."""

    file: RegionFile
    begin: int
    key: str


class RegionFile:
    """What an end knows of a file. end: of the regions that it has seen. n_waiting: those it hasn't tried."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.end = 0
        self.n_waiting = 0

    def look(self, until: str | None = None, most: int | None = None) -> list[FoundRegion]:
        """The regions behind those that it has seen: to the first one of that key, and so many at most.

        Raises FrameError for what is no region, and OSError.
        """
        found: list[FoundRegion] = []
        with _opened(self.path, os.O_RDONLY) as file:
            n_bytes = os.fstat(file).st_size
            while n_bytes - self.end > HEADER_BYTES and (most is None or len(found) < most):
                begin, (flag, header) = self.end, _front(file, self.end)
                end = begin + 1 + framed_bytes(header.n_bytes)
                if end > n_bytes:
                    break
                self.end = end
                if flag == _FETCHED:
                    continue
                found.append(FoundRegion(self, begin, header.key))
                self.n_waiting += 1
                if header.key == until:
                    break
        return found

    def fetch(self, found: FoundRegion, place: Callable[[FrameHeader], memoryview]) -> bool:
        """Reads a region, and marks it as fetched; False: somebody else has fetched it.

        place: where it shall go. Raises FrameError, OSError, and what place() raises.
        """
        self.n_waiting -= 1
        with contextlib.suppress(FileNotFoundError), _opened(self.path, os.O_RDWR) as file:
            _lock_region(file, found.begin)
            if _front(file, found.begin)[0] == _FETCHED:
                return False
            read_region(_reader(file, found.begin + 1), "", place)
            os.pwrite(file, _FETCHED, found.begin)
            return True
        return False

    def remove_if_fetched(self) -> None:
        """Removes it when its writer is gone and all was fetched. A damaged file stays. Raises OSError."""
        ignored = contextlib.suppress(FileNotFoundError, FrameError, BlockingIOError)
        with ignored, _opened(self.path, os.O_RDONLY) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            n_bytes, again = os.fstat(file).st_size, RegionFile(self.path)
            if n_bytes > 0 and not again.look(most=1) and again.end == n_bytes:
                os.unlink(self.path)


class RegionWriter:
    """Appends to a new file. n_bytes: of it."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.path = path
        self.n_bytes = 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        self._close_file = weakref.finalize(self, os.close, self._file)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def is_full(self) -> bool:
        return self.n_bytes >= _FULL

    def append(self, regions: Sequence[tuple[str, memoryview]]) -> None:
        """All of them, or nothing and an OSError."""
        n_bytes = 0
        try:
            for pieces in gathered(_pieces(regions)):
                n_bytes += size_of(pieces)
                left = behind(pieces, os.writev(self._file, pieces))
                while left:
                    left = behind(left, os.writev(self._file, left))
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.n_bytes)
            raise
        self.n_bytes += n_bytes

    def close(self) -> None:
        """Nothing is appended any more. Raises OSError."""
        self._close_file()
        if self.n_bytes == 0:
            os.unlink(self.path)
        RegionFile(self.path).remove_if_fetched()


def _pieces(regions: Sequence[tuple[str, memoryview]]) -> Iterator[bytes | memoryview]:
    for key, data in regions:
        yield _WAITS
        for frame in frames(key, data):
            yield from frame


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FrameError("it is no regular file")
        yield file
    finally:
        os.close(file)


def _lock_region(file: int, begin: int) -> None:
    """Waits for another end that fetches the region, until this file is closed."""
    # of the open file, not of the process, which may have several ends
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, begin, 1, 0)
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, lock)


def _front(file: int, begin: int) -> tuple[bytes, FrameHeader]:
    """Whether a region was fetched, and what its first frame says of it."""
    raw = os.pread(file, 1 + HEADER_BYTES, begin)
    flag = raw[:1]
    if len(raw) <= HEADER_BYTES or flag not in (_WAITS, _FETCHED):
        raise FrameError(f"no region begins at its byte {begin}")
    header = read_header(raw[1:])
    if header.begin:
        raise FrameError(f"at its byte {begin} a region begins in its middle")
    return flag, header


def _reader(file: int, begin: int) -> Callable[[memoryview, str], None]:
    """Reads one buffer after the other."""

    def read(into: memoryview, _what: str) -> None:
        nonlocal begin
        while into:
            n_read = os.preadv(file, [into], begin)
            if n_read == 0:
                raise FrameError("it ends in the middle of a region")
            into, begin = into[n_read:], begin + n_read

    return read

"""Regions as files of a directory: the end that fetches may open it when the other one has gone.

KEY~NUMBER-TAG.region: a key with + for /, and a number that grows, so that regions of one key stay in their
order. A file is written under a name that begins with a dot, and renamed as soon as it is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Iterator

from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.frame import FrameError, FrameHeader, frames, read_region
from pykvgraph.stream.transports.transport import Transport

_NAME = re.compile(r"(?P<key>[A-Za-z0-9_.:=+-]+)~(?P<number>\d+)-[0-9a-f]{8}\.region")
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks at the directory


class FileTransport(Transport):
    """One end of several that share a directory.

    Whatever any of them has flushed, each of them can fetch: it is removed then.
    """

    def __init__(self, address: str, timeout: float) -> None:
        super().__init__(address, timeout)
        self.folder = address.partition(":")[2]
        self._tag = secrets.token_hex(4)
        self._listed: dict[str, deque[str]] = {}
        with self._named_errors("can't be used"):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            numbers = [int(found["number"]) for found in self._look()]
        self._next = max(numbers, default=-1) + 1

    def _send(self, key: str, data: memoryview) -> None:
        name = f"{key.replace('/', '+')}~{self._next:08d}-{self._tag}.region"
        aside = os.path.join(self.folder, f".{secrets.token_hex(8)}.tmp")
        with self._named_errors(f"region {key!r} can't be written"):
            file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                for header, part in frames(key, data):
                    _write(file, header)
                    _write(file, part)
                os.rename(aside, os.path.join(self.folder, name))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(aside)
                raise
            finally:
                os.close(file)
        self._next += 1

    def _receive(self, key: str, into: memoryview) -> None:
        with self._named_errors(f"region {key!r} can't be read"):
            path, file = self._wait_for(key)
            try:
                self._read_file(file, key, into)
            except FrameError as error:
                raise self._error(f"{path}: {error}", "remove the file, and flush the region again") from None
            finally:
                os.close(file)
            os.unlink(path)

    def _wait_for(self, key: str) -> tuple[str, int]:
        """The path of a region's file, and the file."""
        deadline, pause = time.monotonic() + self.timeout, _SHORTEST
        while True:
            if self._ended is not None:
                raise self._error(self._ended, "open it anew")
            found = self._open_listed(key)
            if found is None:
                self._list()
                found = self._open_listed(key)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise self._stalled(f"region {key!r} has not come for {self.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _open_listed(self, key: str) -> tuple[str, int] | None:
        names = self._listed.get(key.replace("/", "+"))
        while names:
            path = os.path.join(self.folder, names.popleft())
            with contextlib.suppress(FileNotFoundError):  # somebody else has fetched it
                return path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        return None

    def _list(self) -> None:
        self._listed.clear()
        for found in sorted(self._look(), key=lambda each: int(each["number"])):
            self._listed.setdefault(found["key"], deque()).append(found.string)

    def _look(self) -> Iterator[re.Match[str]]:
        """The regions that are there, by their names."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if found := _NAME.fullmatch(entry.name):
                    yield found

    def _read_file(self, file: int, key: str, into: memoryview) -> None:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FrameError("it is no regular file")

        def place(header: FrameHeader) -> memoryview:
            if header.key != key:
                raise FrameError(f"it holds region {header.key!r}")
            if header.n_bytes != into.nbytes:
                raise self._other_size(key, header.n_bytes, into.nbytes)
            return into

        read_region(lambda into, what: _read(file, into), "", place)
        if os.read(file, 1):
            raise FrameError("it goes on behind its region")

    def _shut(self) -> None:
        """Whoever waits looks again and again."""

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except TransportError:
            raise
        except OSError as error:
            raise self._error(f"{what} ({error.strerror})", "see its directory and its disk") from None


def _write(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _read(file: int, into: memoryview) -> None:
    while into:
        n_read = os.readv(file, [into])
        if n_read == 0:
            raise FrameError("it ends in the middle of its region")
        into = into[n_read:]

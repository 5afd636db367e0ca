"""Regions in files of a directory: the end that fetches may open it when the other one has gone.

Each end that flushes appends to a file of its own, NUMBER-TAG.regions, and to another one when that is long.
Numbers grow, so that regions of one key stay in their order.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence

from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.frame import FrameError, FrameHeader
from pykvgraph.stream.transports.region_file import FoundRegion, RegionFile, RegionWriter
from pykvgraph.stream.transports.transport import Transport

_NAME = re.compile(r"(?P<number>\d{8,18})-[0-9a-f]{8}\.regions")
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two looks at the directory
_PART_OF_WAIT = 8  # how much later than it came a region may be seen
_MOST_WAITING = 1 << 20  # regions of other keys that are known


class FileTransport(Transport):
    """One end of several that share a directory.

    Whatever any of them has flushed, each of them can fetch, once.
    """

    def __init__(self, address: str, timeout: float) -> None:
        super().__init__(address, timeout)
        self.folder = address.partition(":")[2]
        self._tag = secrets.token_hex(4)
        self._writer: RegionWriter | None = None
        self._number = -1  # of the last file that this end has begun
        self._files: dict[str, RegionFile] = {}
        self._waiting: dict[str, deque[FoundRegion]] = {}
        self._n_waiting = 0
        with self._named_errors("can't be used"):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            self._names()

    def close(self) -> None:
        super().close()
        with self._sending, self._receiving, contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            for file in self._files.values():
                file.remove_if_fetched()
            self._files.clear()

    def _send(self, key: str, data: memoryview) -> None:
        self._send_all([(key, data)])

    def _send_all(self, regions: Sequence[tuple[str, memoryview]]) -> None:
        if not regions:
            return
        with self._named_errors(f"region {regions[0][0]!r} can't be written"):
            if self._writer is not None and self._writer.is_full:
                self._writer.close()
                self._writer = None
            if self._writer is None:
                self._writer = self._begin_file()
            self._writer.append(regions)

    def _begin_file(self) -> RegionWriter:
        self._number = 1 + max(self._number, *map(_number, self._names()), -1)
        return RegionWriter(os.path.join(self.folder, f"{self._number:08d}-{self._tag}.regions"))

    def _receive(self, key: str, into: memoryview) -> None:
        with self._named_errors(f"region {key!r} can't be read"):
            begin = time.monotonic()
            while not self._take(key, into):
                if self._ended is not None:
                    raise self._error(self._ended, "open it anew")
                waited = time.monotonic() - begin
                if waited > self.timeout:
                    raise self._stalled(
                        f"region {key!r} has not come for {self.timeout:g} s{self._cut_off()}"
                    )
                time.sleep(min(max(waited / _PART_OF_WAIT, _SHORTEST), _LONGEST))

    def _take(self, key: str, into: memoryview) -> bool:
        """Whether the region was there."""

        def place(header: FrameHeader) -> memoryview:
            if header.key != key:
                raise FrameError(f"it was changed: region {key!r} has become {header.key!r}")
            if header.n_bytes != into.nbytes:
                raise self._other_size(key, header.n_bytes, into.nbytes)
            return into

        while self._waiting.get(key) or self._look(key):
            found = self._waiting[key].popleft()
            self._n_waiting -= 1
            if not self._waiting[key]:
                del self._waiting[key]
            with self._named_damage(found.file):
                if found.file.fetch(found, place):
                    return True
        return False

    def _look(self, key: str) -> bool:
        """Looks for what has come, until a region of that key is found."""
        self._files = {name: self._files.get(name) or self._file(name) for name in self._names()}
        for file in self._files.values():
            with self._named_damage(file), contextlib.suppress(FileNotFoundError):
                status = os.lstat(file.path)
                if stat.S_ISREG(status.st_mode) and status.st_size <= file.end:
                    if file.end and not file.n_waiting:
                        file.remove_if_fetched()
                    continue
                for found in file.look(key, _MOST_WAITING - self._n_waiting):
                    self._waiting.setdefault(found.key, deque()).append(found)
                    self._n_waiting += 1
            if key in self._waiting:
                return True
            if self._n_waiting >= _MOST_WAITING:
                what = f"{self._n_waiting} regions came before {key!r}"
                raise self._error(what, "fetch in the order of flushing")
        return False

    def _cut_off(self) -> str:
        """What to say of a region that isn't whole."""
        with contextlib.suppress(OSError):
            for file in self._files.values():
                if os.lstat(file.path).st_size > file.end:
                    return f", and {file.path} ends in the middle of a region"
        return ""

    def _file(self, name: str) -> RegionFile:
        return RegionFile(os.path.join(self.folder, name))

    def _names(self) -> list[str]:
        """Of the files that are there, in the order of their numbers."""
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
        return sorted(names, key=lambda name: (_number(name), name))

    def _shut(self) -> None:
        """Whoever waits looks again and again."""

    @contextlib.contextmanager
    def _named_damage(self, file: RegionFile) -> Iterator[None]:
        try:
            yield
        except FrameError as error:
            advice = "remove the file, and flush its regions again"
            raise self._error(f"{file.path}: {error}", advice) from None

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except TransportError:
            raise
        except OSError as error:
            raise self._error(f"{what} ({error.strerror})", "see its directory and its disk") from None


def _number(name: str) -> int:
    return int(name.partition("-")[0])

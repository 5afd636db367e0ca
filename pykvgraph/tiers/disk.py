"""Records in the files of a directory, which several processes may share, within a number of bytes.

A file never changes: it is written aside, synced, and renamed to its key. Whoever changes the directory has
its lock, and counts the change in the lock's file, so that others know when what they remember is old.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from pykvgraph.prefix import block
from pykvgraph.tiers.listing import Listing, RecordFile
from pykvgraph.tiers.record import HEADER_BYTES, MissError, Record, RecordHeader, read_header, split

LOCK = "pykvgraph.lock"
_COUNT = struct.Struct("<Q")
SUFFIXES = {block.TOKENS: ".block", block.END: ".end"}
FILE_NAME = re.compile(r"[0-9a-f]{64}\.(block|end)")
_ASIDE = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOCK_SECONDS = 2.0  # whoever has the lock for longer is stopped, or its disk hangs


class DiskTier:
    """The tier on a disk: the records of a directory. Raises OSError from every method.

    limit: bytes of all records that are there, whoever wrote them, with those that are being written. put()
    never exceeds it. Files with other names are left alone, and don't count.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int) -> None:
        """Makes the directory, if it is missing, and looks at what is in it. It may be read-only."""
        self.folder = Path(folder)
        self.limit = limit
        self._listing = Listing()
        self._count = 0
        self._is_stale = True
        self.n_damaged = 0  # ends of texts that were not what their names say
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                self._make_room(0)
        except OSError as error:
            if error.errno not in _NOT_ALLOWED or not self.folder.is_dir():
                raise _explained(error, self.folder) from None
            self._look()  # reading needs no lock

    @property
    def n_bytes(self) -> int:
        """Of all records, and of those that are being written."""
        return self._listing.n_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._listing.files

    def __len__(self) -> int:
        return len(self._listing.files)

    def ends(self, parent: bytes) -> list[bytes]:
        """Tokens of the ends of texts behind a block."""
        return self._listing.ends(parent)

    def keys(self) -> list[bytes]:
        """Those of all records, the one used longest ago first."""
        return self._listing.oldest_first()

    def n_bytes_of(self, key: bytes) -> int:
        """Of a record; 0: it isn't there."""
        file = self._listing.files.get(key)
        return file.n_bytes if file else 0

    def refresh(self) -> None:
        """Looks again, if others have changed anything."""
        with self._locked():
            pass

    def read(self, key: bytes) -> Record:
        """A record as it is in its file. Raises MissError, too."""
        file = self._listing.files.get(key)
        if file is None:
            raise MissError("gone")
        try:
            data = read_file(self.folder / file.name, file.n_bytes + 1)
        except FileNotFoundError:
            self._listing.forget(key)
            raise MissError("gone") from None
        with contextlib.suppress(OSError):  # for other processes, too
            os.utime(self.folder / file.name)
        self._listing.use(key, time.time_ns())
        return split(data)

    def put(self, key: bytes, record: Record) -> bool:
        """Writes a record, unless it is there; False: there is no room for it."""
        header = read_header(record.header)
        assert header is not None
        name = f"{key.hex()}{SUFFIXES[header.kind]}"
        aside = self.folder / f"{key.hex()}.{secrets.token_hex(8)}.tmp"
        file: int | None = None
        try:
            with self._locked():
                if key in self:
                    return True
                if not self._make_room(record.n_bytes):
                    return False
                self._is_stale = True  # until it is known to be there, or to have gone
                file = _begin(aside, record.n_bytes)
                self._changed()
                self._listing.count(record.n_bytes)
                self._is_stale = False
            _write(file, record)
            with self._locked():
                os.rename(aside, self.folder / name)
                self._changed()
                tokens = header.tokens if header.kind == block.END else b""
                self._listing.add(
                    key, RecordFile(name, record.n_bytes, time.time_ns(), header.parent, tokens)
                )
        except BaseException:
            self._is_stale = True
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        finally:
            if file is not None:
                os.close(file)
        return True

    def remove(self, key: bytes) -> None:
        """Removes a record; what has gone already is fine."""
        with self._locked():
            self._remove(key)

    # ---- with the lock

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _take(lock)
            count = _read_count(lock)
            is_old = count != self._count or self._is_stale
            self._count = before = count
            if is_old:
                self._look()
            try:
                yield
            finally:
                if self._count != before:
                    os.pwrite(lock, _COUNT.pack(self._count), 0)
        finally:
            os.close(lock)

    def _changed(self) -> None:
        self._count = (self._count + 1) % 2**63

    def _look(self) -> None:
        """Every file that is ours; what a process that died was writing goes, and damaged ends of texts."""
        self._is_stale = True
        found = Listing()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _ASIDE.fullmatch(entry.name) and not _is_over(entry.path):
                        found.count(entry.stat(follow_symlinks=False).st_size)
                    elif FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        self._list(entry, found)
        self._listing = found
        self._is_stale = False

    def _list(self, entry: os.DirEntry[str], found: Listing) -> None:
        """One file. The header of an end tells where it belongs, and that it has the right name."""
        key, info = bytes.fromhex(entry.name[:64]), entry.stat(follow_symlinks=False)
        parent = tokens = b""
        if entry.name.endswith(SUFFIXES[block.END]):
            known = self._listing.files.get(key)
            if known is not None and known.n_bytes == info.st_size:
                parent, tokens = known.parent, known.tokens
            else:
                try:
                    header = read_header(read_file(Path(entry.path), HEADER_BYTES))
                except FileNotFoundError:
                    raise
                except OSError:  # of somebody else, perhaps: it takes room, and nobody finds it
                    header = RecordHeader(block.END, b"", b"")
                else:
                    if header is None or block.key(header.parent, header.tokens, block.END) != key:
                        self._drop(entry)
                        return
                parent, tokens = header.parent, header.tokens
        if key in found.files:  # a block has another key than an end: one of them is wrong
            self._drop(entry)
            return
        found.count(info.st_size)
        found.add(key, RecordFile(entry.name, info.st_size, info.st_mtime_ns, parent, tokens))

    def _drop(self, entry: os.DirEntry[str]) -> None:
        """Nobody would ask for it, and it would keep the right one from being written."""
        self.n_damaged += 1
        with contextlib.suppress(OSError):
            os.unlink(entry.path)
            self._changed()

    def _make_room(self, n_bytes: int) -> bool:
        """Removes what was used longest ago until so many bytes are free; False: they never are."""
        if n_bytes > self.limit:
            return False
        for key in self.keys() if self.n_bytes + n_bytes > self.limit else ():
            if self.n_bytes + n_bytes <= self.limit:
                break
            self._remove(key)
        return self.n_bytes + n_bytes <= self.limit

    def _remove(self, key: bytes) -> None:
        file = self._listing.files.get(key)
        if file is None:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / file.name)
        self._listing.forget(key)
        self._changed()


def _explained(error: OSError, folder: Path) -> OSError:
    """The same error, with what it was about."""
    said = f"no directory of prefixes can be had here ({os.strerror(error.errno or 0)}): name another"
    return OSError(error.errno, said, os.fspath(folder))


def _take(lock: int) -> None:
    """The lock of an open file. Raises OSError when nobody lets go of it."""
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
        time.sleep(0.002)


def _read_count(lock: int) -> int:
    data = os.pread(lock, _COUNT.size, 0)
    return int(_COUNT.unpack(data)[0]) % 2**63 if len(data) == _COUNT.size else 0


def _begin(aside: Path, n_bytes: int) -> int:
    """A new file of that size, locked for as long as this process writes it."""
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, n_bytes)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        os.close(file)
        raise
    return file


def _is_over(aside: str) -> bool:
    """Whether nobody writes this file any more: then it is removed."""
    try:
        file = os.open(aside, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(aside)
    except OSError:  # somebody has the lock, or has renamed it
        return False
    finally:
        os.close(file)
    return True


def _write(file: int, record: Record) -> None:
    for part in (record.header, record.rows):
        left = memoryview(part)
        while left:
            left = left[os.write(file, left) :]
    os.fsync(file)


def read_file(path: Path, n_bytes: int) -> bytes:
    """At most so many bytes of a regular file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
        parts: list[bytes] = []
        while n_bytes > 0 and (part := os.read(file, n_bytes)):
            parts.append(part)
            n_bytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(file)

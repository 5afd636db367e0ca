"""Both tiers: what leaves the cells is kept in memory, and from there a thread writes it to the disk."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from pykvgraph.prefix import block
from pykvgraph.tiers.disk import DiskTier
from pykvgraph.tiers.memory import MemoryTier
from pykvgraph.tiers.options import Tiers
from pykvgraph.tiers.record import MissError, Name, Record

_log = logging.getLogger("pykvgraph")
_MOST_QUEUED = 4096  # records that wait for the disk
_REFRESH_SECONDS = 1.0
_QUIET_SECONDS = 60.0


class Store:
    """Records by name, for several threads.

    save() keeps one in memory; where there is a directory, it waits there for the thread that writes. A full
    queue, a full memory or a disk that fails drops what should have been saved, and counts it.
    """

    def __init__(self, tiers: Tiers) -> None:
        """Raises OSError when the directory can't be made or read."""
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._memory = MemoryTier(tiers.ram, self._made_way)
        self._ends: dict[bytes, dict[bytes, bytes]] = {}  # in memory, by parent: keys, by tokens
        self._names: dict[bytes, Name] = {}  # of what is in memory
        self._queue: deque[bytes] = deque()
        self._queued: set[bytes] = set()
        self.counts: Counter[str] = Counter()
        self.n_written_bytes = 0
        self.disk_bytes = tiers.disk
        self._quiet_until = 0.0
        self._closed = False
        self._looked = 0.0
        self._looks = False
        self._disk = DiskTier(tiers.path, tiers.disk) if tiers.path is not None and tiers.disk else None
        self._thread: threading.Thread | None = None
        if self._disk is not None:
            self._thread = threading.Thread(target=self._write_all, name="pykvgraph tiers", daemon=True)
            self._thread.start()

    @property
    def n_bytes(self) -> tuple[int, int]:
        """In memory, and on the disk."""
        return self._memory.n_bytes, self._disk.n_bytes if self._disk is not None else 0

    @property
    def n_damaged(self) -> int:
        """Files that were found not to be what their names say before anybody asked for them."""
        return self._disk.n_damaged if self._disk is not None else 0

    def size_of(self, key: bytes) -> tuple[int, bool]:
        """Bytes of a record, and whether it is on the disk alone."""
        with self._lock:
            if key in self._memory:
                return self._memory.n_bytes_of(key), False
        return (self._disk.n_bytes_of(key) if self._disk is not None else 0), True

    def has(self, key: bytes) -> bool:
        """Whether a record is in memory or on the disk."""
        return key in self._memory or (self._disk is not None and key in self._disk)

    def ends(self, parent: bytes) -> list[bytes]:
        """Tokens of the ends of texts behind a block."""
        with self._lock:
            found = set(self._ends.get(parent, ()))
        return [*found.union(self._disk.ends(parent) if self._disk is not None else ())]

    def save(self, name: Name, n_bytes: int, make: Callable[[], Record | None]) -> None:
        """Keeps what make() gives, unless it is there already. n_bytes: no more than so many."""
        key = name.key
        with self._lock:
            if self.has(key):
                self._memory.touch(key)
                return
            if not self._memory.reserve(n_bytes):
                self.counts["dropped"] += 1
                return
        record = None
        try:
            record = make()
        finally:
            with self._lock:
                if self._keep(name, key, record, n_bytes):
                    self.counts["saved"] += 1
                    self._enqueue(key)

    def load(self, name: Name) -> contextlib.AbstractContextManager[Record]:
        """A record, which stays in memory in the block of a `with`. Raises MissError."""
        return self._loaded(name, name.key)

    def forget(self, key: bytes, *, damaged: bool = False) -> None:
        """Drops a record from memory and from the disk. Failures are counted."""
        with self._lock:
            self._memory.drop(key)
            self._unlist(key)
        if self._disk is not None and key in self._disk:
            try:
                self._disk.remove(key)
            except OSError as error:
                self._tell("removing", error)

    def look_again(self) -> None:
        """Another process may have written something: the thread that writes looks, once a second at most."""
        now = time.monotonic()
        if self._disk is not None and now - self._looked > _REFRESH_SECONDS:
            self._looked = now
            with self._lock:
                self._looks = True
                self._news.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until everything is on the disk; False: it isn't, after so many seconds."""
        end = time.monotonic() + seconds
        with self._lock:
            while self._queue and not self._closed and (left := end - time.monotonic()) > 0:
                self._news.wait(left)
            return not self._queue

    def close(self, seconds: float = 0.0) -> None:
        """Ends the thread; what still waits is dropped."""
        with self._lock:
            self._closed = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    # ---- with the lock

    def _keep(self, name: Name, key: bytes, record: Record | None, reserved: int) -> bool:
        """In memory, for which so many bytes are reserved."""
        if record is None or record.n_bytes > reserved or key in self._memory:
            self._memory.give_back(reserved)
            return False
        self._memory.put(key, record, reserved)
        self._names[key] = name
        if name.kind == block.END:
            self._ends.setdefault(name.parent, {})[name.tokens] = key
        return True

    def _enqueue(self, key: bytes) -> None:
        if self._disk is None or key in self._disk or self._closed:
            return
        if len(self._queue) >= _MOST_QUEUED:
            self.counts["dropped"] += 1
            return
        self._queue.append(key)
        self._queued.add(key)
        self._news.notify_all()

    def _made_way(self, key: bytes) -> None:
        if key in self._queued:
            self.counts["dropped"] += 1
        self._unlist(key)

    def _unlist(self, key: bytes) -> None:
        name = self._names.pop(key, None)
        if name is not None and name.kind == block.END:
            ends = self._ends.get(name.parent, {})
            ends.pop(name.tokens, None)
            if not ends:
                self._ends.pop(name.parent, None)

    # ---- the disk

    @contextlib.contextmanager
    def _loaded(self, name: Name, key: bytes) -> Iterator[Record]:
        with self._lock:
            record = self._memory.use(key)
        if record is None:
            record = self._read(name, key)
        try:
            yield record
        finally:
            with self._lock:
                self._memory.release(key)

    def _read(self, name: Name, key: bytes) -> Record:
        """From the disk into memory, in use."""
        if self._disk is None or key not in self._disk:
            raise MissError("gone")
        n_bytes = self._disk.n_bytes_of(key)
        with self._lock:
            if not self._memory.reserve(n_bytes):
                raise MissError("no-room")
        record = None
        try:
            record = self._disk.read(key)
        except OSError as error:
            self._tell("reading", error)
            raise MissError("unreadable") from None
        finally:
            with self._lock:
                self._keep(name, key, record, n_bytes)
                used = self._memory.use(key) if record is not None else None
        if used is None:
            raise MissError("no-room")
        return used

    def _write_all(self) -> None:
        """The thread that writes."""
        while True:
            with self._lock:
                while not (self._queue or self._closed or self._looks):
                    self._news.wait()
                if self._closed:
                    return
                looks, self._looks = self._looks, False
                key = self._queue[0] if self._queue else None
            try:
                if key is not None:
                    self._write(key)
                elif looks and self._disk is not None:
                    self._disk.refresh()
            except OSError as error:
                self.counts["unwritten"] += key is not None
                self._tell("writing", error)
            finally:
                with self._lock:
                    if key is not None:
                        self._queue.popleft()
                        self._queued.discard(key)
                    self._news.notify_all()

    def _write(self, key: bytes) -> None:
        with self._lock:
            record = self._memory.use(key)
        if record is None or self._disk is None:
            return
        try:
            done = self._disk.put(key, record)
            self.n_written_bytes += record.n_bytes
            self.counts["written" if done else "dropped"] += 1
        finally:
            with self._lock:
                self._memory.release(key)

    def _tell(self, what: str, error: OSError) -> None:
        """One line a minute at most, for as long as it goes on."""
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_SECONDS
            _log.warning("%s prefixes on the disk failed, texts are decoded instead: %s", what, error)

"""The thread that brings rows back: out of the store, into cells that are reserved for them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import KVGraphError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.reserved_cells import Incoming, Place
from pykvgraph.kv_cache.saved.cells import SavedState
from pykvgraph.kv_cache.saved.geometry import Geometry
from pykvgraph.prefix import block
from pykvgraph.tiers.record import MissError, Name, Reason, Record, unpack
from pykvgraph.tiers.store import Store


@contextlib.contextmanager
def checked(store: Store, name: Name) -> Iterator[Record]:
    """A record, which stays in memory in the block of a `with`; one that isn't what it says is dropped.

    Raises MissError, also what the block raises of it.
    """
    try:
        with store.load(name) as record:
            yield record
    except MissError as miss:
        if miss.reason in ("foreign", "damaged", "other"):
            store.forget(name.key)
        raise


class Prefetch:
    """A prefix on its way back: parts of one text, in their order, that fill reserved cells.

    is_done: nothing is written any more; then `reason` says why it failed, None: it has not. state: of the
    text's end, float32, None where no layer has one. seconds: what it took.
    """

    def __init__(self, names: Sequence[Name], incoming: Incoming) -> None:
        self.names = names
        self.incoming = incoming
        self.reason: Reason | None = None
        self.state: npt.NDArray[np.float32] | None = None
        self.is_done = False
        self.is_cancelled = False
        self.seconds = 0.0

    def show(self, kv: KVCache, seq: int, n: int) -> None:
        """The empty sequence, or one with the tokens before these, gets them up to the text's token n.

        Raises what Incoming.show_text() raises.
        """
        self.incoming.show_text(seq, self.state)
        if n < self.names[-1].span.stop:
            kv.seq_rm(seq, n, -1)

    def fill(self, store: Store, geometry: Geometry, swa_full: bool) -> None:
        """Writes the rows of all parts, unless it is cancelled; `reason` says why not."""
        begin = time.perf_counter()
        try:
            for name in self.names:
                if self.is_cancelled:
                    break
                _load(self, name, store, geometry, swa_full)
        except MissError as miss:
            self.reason = miss.reason
        except (KVGraphError, MemoryError):  # it was cancelled, perhaps
            self.reason = "device"
        self.seconds = time.perf_counter() - begin

    def cancel(self) -> None:
        """Its cells are empty again; nothing more is written into them."""
        self.is_cancelled = True
        self.incoming.give_back()


def places_for(names: Sequence[Name], geometry: Geometry, swa_full: bool) -> list[Place]:
    """The cells that these parts need: those of a window only at the end of the text."""
    span, end = range(names[0].begin, names[-1].span.stop), names[-1].span.stop
    is_end = names[-1].kind == block.END
    places = []
    for group in geometry.groups:
        if group.window and not swa_full:
            span_here = range(max(0, end - group.window), end) if is_end else range(0)
        else:
            span_here = span
        places.append(Place(span_here))
    return places


class ToMemory:
    """A record that is read from the disk into memory. is_done, reason: as a Prefetch has them."""

    def __init__(self, name: Name) -> None:
        self._name = name
        self.reason: Reason | None = None
        self.is_done = self.is_cancelled = False

    def fill(self, store: Store, geometry: Geometry, swa_full: bool) -> None:
        """Reads it, unless it is cancelled."""
        if self.is_cancelled:
            return
        try:
            with checked(store, self._name):
                pass
        except MissError as miss:
            self.reason = miss.reason
        except MemoryError:
            self.reason = "no-room"


class Loader:
    """Does one job after the other. notify: is called after each of them, in the loader's thread."""

    def __init__(self, store: Store, geometry: Geometry, swa_full: bool, notify: Callable[[], None]) -> None:
        self._store = store
        self._geometry = geometry
        self._swa_full = swa_full
        self._notify = notify
        self._waiting: queue.SimpleQueue[Prefetch | ToMemory | None] = queue.SimpleQueue()
        self.current: Prefetch | ToMemory | None = None
        self._thread = threading.Thread(target=self._run, name="pykvgraph loader", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether it is still at a job that nobody waits for any more."""
        current = self.current
        return current is not None and current.is_cancelled

    def add(self, job: Prefetch | ToMemory) -> None:
        """To be done when those before it are."""
        self._waiting.put(job)

    def close(self) -> None:
        """It ends when what it does now is done; nobody waits for that for longer than a second."""
        self._waiting.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            self.current = job
            job.fill(self._store, self._geometry, self._swa_full)
            self.current = None
            job.is_done = True
            self._notify()


def _load(prefetch: Prefetch, name: Name, store: Store, geometry: Geometry, swa_full: bool) -> None:
    with checked(store, name) as record:
        _put(prefetch, name, unpack(record, name, geometry), geometry, swa_full)


def _put(prefetch: Prefetch, name: Name, saved: SavedState, geometry: Geometry, swa_full: bool) -> None:
    """Writes the rows of a part. Cells of windows come with the end alone."""
    first = name.begin - prefetch.names[0].begin
    for index, (cells, group) in enumerate(zip(saved.groups, geometry.groups, strict=True)):
        n = len(cells.pos)
        if group.window and not swa_full:
            begin, wanted = 0, min(group.window, name.span.stop) if name.kind == block.END else 0
        else:
            begin, wanted = first, len(name.span)
        if n != wanted:
            raise MissError("other")
        if n and group.layers:
            prefetch.incoming.write(
                index, range(group.n_layer), range(begin, begin + n), cells.rows, cells.dither
            )
    if saved.states is not None:
        prefetch.state = saved.states.rows[saved.states.owners[0, 2]].copy()

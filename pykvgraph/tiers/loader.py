"""The thread that brings rows back: out of the store, into cells that are reserved for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import KVGraphError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.reserved_cells import Incoming, Place
from pykvgraph.kv_cache.saved.cells import SavedState
from pykvgraph.kv_cache.saved.geometry import Geometry
from pykvgraph.prefix import block
from pykvgraph.tiers.record import MissError, Name, Reason, unpack
from pykvgraph.tiers.store import Store


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


class Loader:
    """Loads one prefix after the other. notify: is called after each of them, in the loader's thread."""

    def __init__(self, store: Store, geometry: Geometry, swa_full: bool, notify: Callable[[], None]) -> None:
        self._store = store
        self._geometry = geometry
        self._swa_full = swa_full
        self._notify = notify
        self._waiting: queue.SimpleQueue[Prefetch | None] = queue.SimpleQueue()
        self.current: Prefetch | None = None
        self._thread = threading.Thread(target=self._run, name="pykvgraph loader", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether it is still at a prefetch that nobody waits for any more."""
        current = self.current
        return current is not None and current.is_cancelled

    def add(self, prefetch: Prefetch) -> None:
        """To be done when those before it are."""
        self._waiting.put(prefetch)

    def close(self) -> None:
        """It ends when what it does now is done; nobody waits for that for longer than a second."""
        self._waiting.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (prefetch := self._waiting.get()) is not None:
            self.current = prefetch
            fill(prefetch, self._store, self._geometry, self._swa_full)
            self.current = None
            prefetch.is_done = True
            self._notify()


def fill(prefetch: Prefetch, store: Store, geometry: Geometry, swa_full: bool) -> None:
    """Writes the rows of all parts, unless it is cancelled; prefetch.reason says why not."""
    begin = time.perf_counter()
    try:
        for name in prefetch.names:
            if prefetch.is_cancelled:
                break
            _load(prefetch, name, store, geometry, swa_full)
    except MissError as miss:
        prefetch.reason = miss.reason
    except (KVGraphError, MemoryError):  # it was cancelled, perhaps
        prefetch.reason = "device"
    prefetch.seconds = time.perf_counter() - begin


def _load(prefetch: Prefetch, name: Name, store: Store, geometry: Geometry, swa_full: bool) -> None:
    try:
        with store.load(name) as record:
            _put(prefetch, name, unpack(record, name, geometry), geometry, swa_full)
    except MissError as miss:
        if miss.reason in ("foreign", "damaged", "other"):
            store.forget(name.key)
        raise


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

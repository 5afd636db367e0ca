"""Texts that are read (Reading): one at a time has a sequence, and is decoded in parts."""

from __future__ import annotations

from collections import deque

from pykvgraph.context.context import Context
from pykvgraph.engine.admission import Admission
from pykvgraph.engine.reading import Reading
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.errors import CacheFullError, DeviceError


class Readings:
    """They are read in their order, a part between two steps.

    The one that is read keeps its sequence from part to part; admission counts the cells that it may take.
    waits_for_cells: whether the first one can't begin beside those that run; nobody enters before it then.
    """

    def __init__(self, ctx: Context, running_set: RunningSet, admission: Admission) -> None:
        self.waits_for_cells = False
        self._waiting: deque[Reading] = deque()
        self._now: Reading | None = None
        self._ctx = ctx
        self._running_set = running_set
        self._admission = admission
        self._index = running_set.index  # as it was when the one that is read began

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read."""
        return self._now is None and not self._waiting

    @property
    def has_begun(self) -> bool:
        """Whether one of them has a sequence."""
        return self._now is not None

    def add(self, reading: Reading) -> None:
        """It is read behind the others."""
        self._waiting.append(reading)

    def read_part(self, n_tokens: int) -> bool:
        """Decodes so many tokens at most of the one whose turn it is; False: there is none."""
        reading = self._now or self._begin()
        if reading is None:
            return False
        try:
            if self._index is not self._running_set.index:
                raise DeviceError("the device failed for another text, and the cells of this one are lost")
            wanted = reading.is_wanted()
            if wanted:
                n = reading.n_next(n_tokens)
                self._make_room(n)
                reading.read(self._ctx, self._index, n)
        except Exception as error:
            self._end_it(reading, error)
        else:
            if not wanted or not reading.n_left:
                self._end_it(reading, None)
        return True

    def end(self, error: BaseException) -> None:
        """Whoever waits hears the error. No step may follow."""
        for each in (*([self._now] if self._now else []), *self._waiting):
            each.done.set_exception(error)
        self._now = None
        self._waiting.clear()

    def _begin(self) -> Reading | None:
        """The first one that is wanted gets a sequence, if there are one and the cells for it."""
        self.waits_for_cells = False
        scheduler = self._running_set.scheduler
        while self._waiting:
            first = self._waiting[0]
            is_small = len(first.ids) <= self._ctx.n_ctx
            has_seq = scheduler.n_free_seqs > 0
            fits = is_small and has_seq and self._fits(first)
            if is_small and not fits and first.is_wanted():
                self.waits_for_cells = has_seq
                return None
            self._waiting.popleft()
            if fits:
                first.seq = scheduler.borrow()
                self._now, self._index = first, self._running_set.index
                return first
            if is_small:
                first.tell()
            else:
                first.done.set_exception(self._no_room(first))
        return None

    def _fits(self, reading: Reading) -> bool:
        """Whether it may begin; beside nobody, in the place of what is pinned for a time."""
        running = self._running_set.scheduler.running
        while not self._admission.begin_reading(running, reading):
            if running or not self._running_set.index.give_up_pin():
                return False
        return True

    def _make_room(self, n: int) -> None:
        """With overcommit there may be too few cells: then the youngest texts are preempted."""
        while not self._index.make_room(n) and self._running_set.scheduler.running:
            self._running_set.preempt(self._running_set.scheduler.youngest())

    def _end_it(self, reading: Reading, error: Exception | None) -> None:
        """Its sequence is empty again, and free."""
        self._now = self._admission.reading = None
        self._running_set.kv.seq_rm(reading.seq, -1, -1)
        self._running_set.scheduler.give_back(reading.seq)
        reading.seq = -1
        self._running_set.start_over_if_broken()
        if error is None:
            reading.tell()
        else:
            reading.done.set_exception(error)

    def _no_room(self, reading: Reading) -> CacheFullError:
        return CacheFullError(
            f"the text has {len(reading.ids)} tokens, and the cache {self._ctx.n_ctx} cells: shorten it, or "
            "use a larger n_ctx"
        )

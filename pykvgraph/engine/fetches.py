"""Prefixes that come back from memory and disk: which are worth it, and how they get into the cells."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from pykvgraph.context.context import Context
from pykvgraph.engine.fetch import Fetch, Plan
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine.step_times import times_of
from pykvgraph.engine.types import TierStats
from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.kv_cache.reserved_cells import Incoming, Place
from pykvgraph.prefix import block
from pykvgraph.prefix.match import Found, Match
from pykvgraph.tiers.loader import Loader, Prefetch, ToMemory, places_for
from pykvgraph.tiers.peers import LoadRate
from pykvgraph.tiers.record import REASONS, Name, Reason
from pykvgraph.tiers.rows import Saver
from pykvgraph.tiers.search import parts_of
from pykvgraph.tiers.store import Store

_log = logging.getLogger("pykvgraph")
_PATIENCE = 2.0  # times the seconds of decoding
_LEAST_PATIENCE = 1.0  # seconds
_WAIT = 0.01  # seconds, until whoever waits looks for news
_CLOSE_SECONDS = 10.0
_N_FAILED = 64  # records that are not tried again


class Fetches:
    """Of the texts of one engine. Counts hits in tokens, and misses by reason."""

    def __init__(self, ctx: Context, store: Store, saver: Saver) -> None:
        self.misses: Counter[Reason] = Counter()
        self.n_loaded = 0
        self.store = store
        self._ctx = ctx
        self._saver = saver
        self._geometry = ctx.kv._geometry
        self._seconds = decode_seconds(ctx)
        self._rate = LoadRate()
        self._running: list[RequestSequence] = []
        self._to_memory: dict[bytes, tuple[ToMemory, float]] = {}  # and until when somebody waits
        self._news = threading.Event()
        self._loader = Loader(store, self._geometry, ctx.swa_full, self._news.set)
        self.failed: dict[bytes, None] = {}  # keys of records that are not made of blocks, the oldest first
        self._told: set[Reason] = set()

    @property
    def any(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._running or self._to_memory)

    def wait(self) -> None:
        """Until something has come, or for a moment."""
        self._news.wait(_WAIT)
        self._news.clear()

    # ---- what there is

    def plan(self, ids: array[int], salt: bytes, found: Found, limit: int) -> Plan | None:
        """What is worth loading of the first `limit` tokens of a text of which the cells have that; None:
        nothing."""
        if self._loader.is_stuck:
            return None
        if limit - found.n < block.N_TOKENS:
            return None
        path = [node for node in found.match.path if node.n_tokens in (0, block.N_TOKENS)]
        keys = [node.key(self._saver.root_key(salt)) for node in path]
        names, n, known = parts_of(self.store, ids, keys, limit, has_points=self._saver.has_points)
        if n - found.n < block.N_TOKENS:
            self.store.look_again()
            return None
        path = path[: names[0].begin // block.N_TOKENS + 1]
        known = min(max(found.match.n, known), limit)
        start = Found(Match(path, None, 0, path[-1].end), path[-1].end, None)
        sizes = [self.store.size_of(name.key) for name in names]
        on_disk = [is_on_disk for _, is_on_disk in sizes]
        plan = Plan(start, names, n, known, self._rate.cost(sizes), self._seconds(found.n, n), on_disk)
        if self._rate.seconds(plan.cost) >= plan.seconds:
            self._rate.refuse(plan.cost)
            return None
        return plan

    # ---- how it comes

    def start(self, sequence: RequestSequence, plan: Plan, running_set: RunningSet) -> bool:
        """Reserves cells, and sends for the rows; False: there is no room. The text has plan.found."""
        places = places_for(plan.names, self._geometry, self._ctx.swa_full)
        incoming = (
            self._reserved(places, running_set)
            if running_set.index.make_room(plan.end - plan.found.n)
            else None
        )
        if incoming is None:
            return self.miss("no-room")
        job = Prefetch(plan.names, incoming)
        sequence.fetch = Fetch(plan, job, _late(plan.seconds))
        self._running.append(sequence)
        self._loader.add(job)
        return True

    def _reserved(self, places: Sequence[Place], running_set: RunningSet) -> Incoming | None:
        """Cells; None: there is no room for them."""
        try:
            return running_set.index.with_points_room(lambda: self._ctx.kv.reserve(places), len(places))
        except (KVGraphError, MemoryError):
            return None

    # ---- records that are not made of blocks

    def pays(self, name: Name, n_had: int) -> bool:
        """Whether to load a record is faster than to decode its tokens behind the n_had that are there."""
        if n_had >= name.span.stop:
            return False
        cost = self._rate.cost([self.store.size_of(name.key)])
        return self._rate.seconds(cost) < self._seconds(n_had, name.span.stop)

    def is_coming(self, name: Name, n_had: int) -> bool:
        """Whether a record is on its way from the disk to memory, where it is wanted now."""
        key = name.key
        if key in self._to_memory:
            return True
        if key in self.failed or self._loader.is_stuck or not self.store.size_of(key)[1]:
            return False
        job = ToMemory(name)
        self._to_memory[key] = job, _late(self._seconds(n_had, name.span.stop))
        self._loader.add(job)
        return True

    def fail(self, key: bytes) -> None:
        """It isn't tried again."""
        self.failed[key] = None
        if len(self.failed) > _N_FAILED:
            del self.failed[next(iter(self.failed))]

    def _settle(self) -> None:
        """Records that have come, or that nobody waits for any longer."""
        for key, (job, late) in [*self._to_memory.items()]:
            is_late = not job.is_done and time.monotonic() > late
            if is_late or job.is_done:
                del self._to_memory[key]
                job.is_cancelled = True
            if is_late or job.reason is not None:
                self.fail(key)
                self.miss(job.reason or "late")

    def finished(self) -> list[tuple[RequestSequence, Fetch]]:
        """The texts whose rows have come, or won't come, with what they waited for."""
        self._settle()
        now, found, left = time.monotonic(), [], []
        for sequence in self._running:
            fetch = sequence.fetch
            if fetch is None:  # it was preempted, or has ended
                continue
            if fetch.job.is_done or now > fetch.late:
                found.append((sequence, fetch))
            else:
                left.append(sequence)
        self._running = left
        return found

    def show(self, sequence: RequestSequence, fetch: Fetch, running_set: RunningSet) -> bool:
        """The text has what came; False: it has not, and its sequence is as it was before or worse."""
        job, plan = fetch.job, fetch.plan
        sequence.fetch = None
        if not job.is_done or job.reason is not None:
            job.cancel()
            return self.miss(job.reason or "late")
        assert sequence.last is not None
        try:
            job.show(self._ctx.kv, sequence.seq, plan.n)
            sequence.last = running_set.index.extend(
                sequence.last, sequence.ids, plan.n, sequence.seq, to_end=True
            )
            if running_set.needs_points:
                running_set.index.add_point(sequence.last, sequence.ids, plan.n, sequence.seq)
        except (KVGraphError, MemoryError):
            job.cancel()
            return self.miss("device")
        self.n_loaded += plan.n - plan.found.n
        self._rate.learn(plan.cost, job.seconds)
        return True

    def close(self, running_set: RunningSet | None) -> None:
        """Ends what is on its way, and puts what the index has on the disk, unless `running_set` is None."""
        for sequence in self._running:
            if sequence.fetch is not None:
                sequence.fetch.job.cancel()
        for job, _ in self._to_memory.values():
            job.is_cancelled = True
        self._running.clear()
        self._loader.close()
        if running_set is not None:
            self._save_all(running_set)
        self.store.close(1.0)

    def _save_all(self, running_set: RunningSet) -> None:
        """What was used last comes first; what would make it go from the disk again is left out."""
        end, before = time.monotonic() + _CLOSE_SECONDS, self.store.n_written_bytes
        with contextlib.suppress(KVGraphError, OSError):
            for _ in running_set.index.save():
                left = end - time.monotonic()
                is_full = self.store.n_written_bytes - before >= self.store.disk_bytes
                if left <= 0 or is_full or not self.store.flush(left):
                    return

    def stats(self) -> TierStats:
        """How much there is, and what became of it."""
        counts, (ram, disk) = self.store.counts, self.store.n_bytes
        misses = self.misses + Counter(damaged=self.store.n_damaged)
        return TierStats(
            ram_bytes=ram,
            disk_bytes=disk,
            loaded_tokens=self.n_loaded,
            saved=counts["saved"],
            written=counts["written"],
            dropped=counts["dropped"],
            unwritten=counts["unwritten"],
            misses={reason: misses[reason] for reason in REASONS},
        )

    def miss(self, reason: Reason) -> bool:
        """Counts one; False."""
        self.misses[reason] += 1
        if reason not in self._told and reason != "no-room":
            self._told.add(reason)
            _log.warning("a prefix could not be loaded (%s): it is decoded instead", reason)
        return False


def _late(seconds: float) -> float:
    """Until when a text waits for what it could decode in so many seconds."""
    return time.monotonic() + max(_LEAST_PATIENCE, _PATIENCE * seconds)


def decode_seconds(ctx: Context) -> Callable[[int, int], float]:
    """How long it takes to decode tokens [first, end) of a text."""
    try:
        times = times_of(ctx)
    except InvalidArgumentError:  # too few cells to measure in: loading pays
        return lambda first, end: float("inf")
    return lambda first, end: times.prefill(1, end, ctx.n_ubatch) - times.prefill(1, first, ctx.n_ubatch)

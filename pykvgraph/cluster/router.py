"""Which worker gets a request."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass

from pykvgraph.cluster.prefixes import Prefixes, TextBlock

# A worker is overloaded when it has no free slot and another worker has one; or when it is asked for over
# OVERLOAD times the bytes that the least loaded one is asked for, and SLACK.
OVERLOAD = 2
SLACK = 64 << 10
# A prompt of which the worker lacks so many bytes may be read by another one: less, about 128 tokens, is read
# before the other one has been asked.
PREFILL_BYTES = 512

_Entry = tuple[int, int, int]


@dataclass
class _Load:
    n_requests: int = 0
    weight: int = 0
    drains: bool = False


class Router:
    """Knows the workers by their numbers, what they are asked for now, and what they were asked before.

    n_slots: requests that a worker answers at a time. prefixes: who was asked what. Workers are kept in order
    of their loads, and prefixes know who has a block, so that a choice among thousands looks at few of them.
    """

    def __init__(self, n_slots: int, prefixes: Prefixes | None = None) -> None:
        self._n_slots = n_slots
        self._loads: dict[int, _Load] = {}
        self._prefixes = Prefixes() if prefixes is None else prefixes
        # (weight, requests, number) of those that may get a request, the least loaded first: with a free
        # slot, and without one
        self._free: list[_Entry] = []
        self._full: list[_Entry] = []

    @property
    def workers(self) -> list[int]:
        """Those that may get a request."""
        return sorted(worker for worker, load in self._loads.items() if not load.drains)

    def n_requests(self, worker: int) -> int:
        """Those that the worker has now."""
        return self._loads[worker].n_requests if worker in self._loads else 0

    def add(self, worker: int, n_tokens: int) -> None:
        """A worker has come, with an empty cache, which has room for so many tokens."""
        self.remove(worker)
        self._prefixes.begin(worker, n_tokens)
        self._loads[worker] = _Load()
        self._put(worker, self._loads[worker])

    def drain(self, worker: int) -> None:
        """The worker gets nothing new; what it has ends."""
        if worker in self._loads:
            self._take(worker, self._loads[worker])
            self._loads[worker].drains = True

    def remove(self, worker: int) -> None:
        """The worker is gone, with its cache."""
        if worker in self._loads:
            self._take(worker, self._loads.pop(worker))
        self._prefixes.forget(worker)

    def choose(self, blocks: Sequence[TextBlock], without: Container[int] = ()) -> int | None:
        """Who has the longest part of the text and isn't overloaded; None: there is no worker.

        Of several that have as much, the least loaded. without: those that it must not be, if there are
        others.
        """
        for order in (self._free, self._full):
            least = next((entry for entry in order if entry[2] not in without), None)
            if least:
                most = OVERLOAD * least[0] + SLACK
                return self._having_most(blocks, _Fit(order, most, without), least[2])
        return self.choose(blocks) if without else None

    def n_missing(self, worker: int, blocks: Sequence[TextBlock]) -> int:
        """Bytes of the text that the worker lacks, as far as they are in whole blocks."""
        return blocks[-1].end - self._prefixes.length(worker, blocks) if blocks else 0

    def has_free_slot(self, worker: int) -> bool:
        """Whether what it is asked for next begins at once."""
        return self.n_requests(worker) < self._n_slots

    def copied(self, worker: int, blocks: Sequence[TextBlock]) -> None:
        """The worker gets a copy of this text, which another one has."""
        if worker in self._loads:
            self._prefixes.remember(worker, blocks)

    def enter(self, worker: int, blocks: Sequence[TextBlock], weight: int) -> Ticket:
        """The worker gets a request. weight: bytes that it is asked to read and to write, about."""
        self._prefixes.remember(worker, blocks)
        load = self._loads[worker]
        self._change(worker, load, 1, weight)
        return Ticket(self, worker, load, weight)

    def _having_most(self, blocks: Sequence[TextBlock], fit: _Fit, least: int) -> int:
        """Who has a block has those in front of it; so of two blocks, at most as many have the later one."""
        best, low, high = least, 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            found = self._least_of(self._prefixes.holders(blocks[middle - 1]), fit)
            if found is None:
                high = middle - 1
            else:
                best, low = found, middle
        return best

    def _least_of(self, holders: Collection[int], fit: _Fit) -> int | None:
        """The least loaded of those that fit: from the holders or, where these are many, from all."""
        if len(holders) ** 2 > len(fit.order):
            return next((worker for worker in fit.workers() if worker in holders), None)
        entries = [
            _entry(worker, load)
            for worker in holders
            if (load := self._loads.get(worker)) and not load.drains and self._list(load) is fit.order
        ]
        fitting = [entry for entry in entries if entry[0] <= fit.most and entry[2] not in fit.without]
        return min(fitting)[2] if fitting else None

    def _change(self, worker: int, load: _Load, n: int, weight: int) -> None:
        """So many more requests, and so much more weight."""
        is_there = self._loads.get(worker) is load and not load.drains
        if is_there:
            self._take(worker, load)
        load.n_requests += n
        load.weight += weight
        if is_there:
            self._put(worker, load)

    def _put(self, worker: int, load: _Load) -> None:
        insort(self._list(load), _entry(worker, load))

    def _take(self, worker: int, load: _Load) -> None:
        if not load.drains:
            order = self._list(load)
            del order[bisect_left(order, _entry(worker, load))]

    def _list(self, load: _Load) -> list[_Entry]:
        return self._free if load.n_requests < self._n_slots else self._full


class Ticket:
    """A request that a worker has, until it leaves; the worker may be gone by then."""

    def __init__(self, router: Router, worker: int, load: _Load, weight: int) -> None:
        self._router = router
        self._worker = worker
        self._load = load
        self._weight = weight

    def leave(self) -> None:
        """The request has ended."""
        self._router._change(self._worker, self._load, -1, -self._weight)


@dataclass(frozen=True)
class _Fit:
    """Workers in order of their loads, of which those are looked for whose weight is at most `most`."""

    order: list[_Entry]
    most: int
    without: Container[int]

    def workers(self) -> Iterator[int]:
        """The least loaded first."""
        for weight, _, worker in self.order:
            if weight > self.most:
                return
            if worker not in self.without:
                yield worker


def _entry(worker: int, load: _Load) -> _Entry:
    return load.weight, load.n_requests, worker


def reader_for(worker: int, blocks: Sequence[TextBlock], router: Router, prefill: Router) -> int | None:
    """Who reads a prompt for a worker of `router`, of the workers of `prefill`; None: it does so itself.

    It does when little of the prompt is new to it, when all that read are at work, and when they would have
    to read more than twice as much: a talk that goes on is known to who has answered it, and not to them.
    """
    n_missing = router.n_missing(worker, blocks)
    reader = prefill.choose(blocks) if n_missing >= PREFILL_BYTES else None
    if reader is None or not prefill.has_free_slot(reader):
        return None
    return reader if prefill.n_missing(reader, blocks) <= 2 * n_missing else None

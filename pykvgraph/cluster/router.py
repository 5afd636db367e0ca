"""Which worker gets a request."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from pykvgraph.cluster.prefixes import MOST_KEYS, Block, Prefixes

# A worker is overloaded when it has no free slot and another worker has one; or when it is asked for over
# OVERLOAD times the bytes that the least loaded one is asked for, and SLACK.
OVERLOAD = 2
SLACK = 16 << 10


@dataclass
class _Load:
    n_requests: int = 0
    weight: int = 0
    drains: bool = False


class Router:
    """Knows the workers by their numbers, what they are asked for now, and what they were asked before.

    n_slots: requests that a worker answers at a time. most_keys: see Prefixes.
    """

    def __init__(self, n_slots: int, most_keys: int = MOST_KEYS) -> None:
        self._n_slots = n_slots
        self._loads: dict[int, _Load] = {}
        self._prefixes = Prefixes(most_keys)

    @property
    def workers(self) -> list[int]:
        """Those that may get a request."""
        return sorted(worker for worker, load in self._loads.items() if not load.drains)

    def n_requests(self, worker: int) -> int:
        """Those that the worker has now."""
        return self._loads[worker].n_requests if worker in self._loads else 0

    def add(self, worker: int) -> None:
        """A worker has come, with an empty cache."""
        self._prefixes.forget(worker)
        self._loads[worker] = _Load()

    def drain(self, worker: int) -> None:
        """The worker gets nothing new; what it has ends."""
        if worker in self._loads:
            self._loads[worker].drains = True

    def remove(self, worker: int) -> None:
        """The worker is gone, with its cache."""
        self._loads.pop(worker, None)
        self._prefixes.forget(worker)

    def choose(self, blocks: Sequence[Block], without: Container[int] = ()) -> int | None:
        """Who has the longest part of the text and isn't overloaded; None: there is no worker.

        Of several that have as much, the least loaded. without: those that it must not be, if there are
        others.
        """
        workers = [worker for worker in self.workers if worker not in without] or self.workers
        if not workers:
            return None
        fit = self._not_overloaded(workers)
        return max(fit, key=lambda worker: (self._prefixes.length(worker, blocks), *self._idleness(worker)))

    def enter(self, worker: int, blocks: Sequence[Block], weight: int) -> Ticket:
        """The worker gets a request. weight: bytes that it is asked to read and to write, about."""
        self._prefixes.remember(worker, blocks)
        load = self._loads[worker]
        load.n_requests += 1
        load.weight += weight
        return Ticket(load, weight)

    def _not_overloaded(self, workers: Sequence[int]) -> list[int]:
        """At least one of them."""
        loads = {worker: self._loads[worker] for worker in workers}
        free = {worker: load for worker, load in loads.items() if load.n_requests < self._n_slots} or loads
        most = OVERLOAD * min(load.weight for load in free.values()) + SLACK
        return [worker for worker, load in free.items() if load.weight <= most]

    def _idleness(self, worker: int) -> tuple[int, int, int]:
        load = self._loads[worker]
        return -load.weight, -load.n_requests, -worker


class Ticket:
    """A request that a worker has, until it leaves; the worker may be gone by then."""

    def __init__(self, load: _Load, weight: int) -> None:
        self._load = load
        self._weight = weight

    def leave(self) -> None:
        """The request has ended."""
        self._load.n_requests -= 1
        self._load.weight -= self._weight
        self._weight = 0

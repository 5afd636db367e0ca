"""The real router before simulated workers, and what a central index would have done."""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pykvgraph.cluster.prefixes import TOKEN_BYTES, Block
from pykvgraph.cluster.router import Router, Ticket
from pykvgraph.cluster.simulation.caches import Caches
from pykvgraph.cluster.simulation.machine import Machine, Text
from pykvgraph.cluster.simulation.traffic import Asked, Traffic
from pykvgraph.plan.time_model import TimeModel

POLICIES = ("router", "index", "load")
N_SLOTS = 4
N_CELLS = 16_384  # tokens of a worker's cache
BUSY = 0.7  # so many people ask that workers decode for this part of the time, or a little more
N_REQUESTS = 3  # for each person, and at least LEAST_REQUESTS; of the first quarter nothing is told
LEAST_REQUESTS = 10_000
_SEED = 1
_FEW, _LONG = 10, 200  # workers that show how many people are enough, and requests for each of them


@dataclass(frozen=True)
class Outcome:
    """Of one run. n_prompt: tokens of all prompts. n_cached: those that caches had. first: seconds from a
    request to its first token, each of them. tokens_per_second: of answers, of all workers together.
    choice_seconds: what a choice took on this machine, on average. busy: the part of the time in which
    workers have decoded.
    """

    n_workers: int
    policy: str
    n_prompt: int
    n_cached: int
    first: tuple[float, ...]
    tokens_per_second: float
    choice_seconds: float
    busy: float

    @property
    def hits(self) -> float:
        """The part of the prompts that caches had."""
        return self.n_cached / self.n_prompt


def simulate(
    times: TimeModel, n_workers: int, n_people: int, policy: str, least: int | None = None
) -> Outcome:
    """n_people: for each worker. policy, one of POLICIES: the router with its own prefixes; with a central
    index of all caches; by load alone. least: requests, however few the workers are; None: LEAST_REQUESTS.
    """
    return _Simulation(times, n_workers, n_people, policy).run(
        max(N_REQUESTS * n_people * n_workers, LEAST_REQUESTS if least is None else least)
    )


def people_for(times: TimeModel) -> int:
    """How many people for each worker keep workers BUSY."""

    def is_enough(n_people: int) -> bool:
        return simulate(times, _FEW, n_people, "router", _FEW * _LONG).busy >= BUSY

    high = 1
    while not is_enough(high):
        high *= 2
    low = high // 2  # is not enough
    while high - low > max(low // 10, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


class _Worker(Machine):
    def __init__(self, number: int, times: TimeModel, caches: Caches) -> None:
        super().__init__(times, N_SLOTS)
        self.number = number
        self.version = 0  # of its plan
        self._caches = caches

    def n_cached(self, text: Text) -> int:
        return self._caches.n_cached(self.number, text.asked.blocks)


class _Simulation:
    def __init__(self, times: TimeModel, n_workers: int, n_people: int, policy: str) -> None:
        self._policy = policy
        self._caches = Caches()
        self._router = Router(N_SLOTS, self._caches if policy == "index" else None)
        self._workers = [_Worker(number, times, self._caches) for number in range(n_workers)]
        for worker in self._workers:
            self._caches.begin(worker.number, N_CELLS)
            self._router.add(worker.number, N_CELLS)
        traffic = Traffic(_SEED)
        self._people = [traffic.person(number) for number in range(n_people * n_workers)]
        self._order = itertools.count()
        # (when, which came first, whose turn): a person who asks, or a worker whose phase ends
        self._events: list[tuple[float, int, _Person | tuple[_Worker, int]]] = []
        self._open: dict[Text, tuple[_Person, Ticket]] = {}
        self._done: list[Text] = []
        self._choosing = 0.0

    def run(self, n_requests: int) -> Outcome:
        """Until so many have been answered."""
        for turns in self._people:
            person = _Person(turns)
            self._push(person.think(), person)
        now = 0.0
        n_warm = n_requests // 4
        warm_at = 0.0
        while len(self._done) < n_requests:
            now, _, who = heapq.heappop(self._events)
            if isinstance(who, _Person):
                self._ask(who, now)
            elif who[1] == who[0].version:
                self._end_phase(who[0], now)
            if not warm_at and len(self._done) >= n_warm:
                warm_at = now
        told = self._done[n_warm:]
        return Outcome(
            len(self._workers),
            self._policy,
            sum(text.asked.n_prompt for text in told),
            sum(text.n_cached for text in told),
            tuple(text.first - text.came for text in told),
            sum(text.asked.n_answer for text in told) / (now - warm_at),
            self._choosing / (len(self._done) + len(self._open)),
            statistics.fmean(worker.seconds_busy for worker in self._workers) / now,
        )

    def _ask(self, person: _Person, now: float) -> None:
        asked = person.asked
        begin = time.perf_counter()
        blocks: tuple[Block, ...] = () if self._policy == "load" else asked.blocks
        number = self._router.choose(blocks)
        assert number is not None
        ticket = self._router.enter(number, blocks, (asked.n_prompt + asked.n_answer) * TOKEN_BYTES)
        self._choosing += time.perf_counter() - begin
        text = Text(asked, now)
        self._open[text] = person, ticket
        worker = self._workers[number]
        worker.enter(text, now)
        self._plan(worker)

    def _end_phase(self, worker: _Worker, now: float) -> None:
        read, answered = worker.step()
        for text in read:
            self._caches.store(worker.number, text.asked.blocks)
        for text in answered:
            self._caches.store(worker.number, text.asked.after)
            person, ticket = self._open.pop(text)
            ticket.leave()
            self._done.append(text)
            self._push(now + person.think(), person)
        self._plan(worker)

    def _plan(self, worker: _Worker) -> None:
        worker.version += 1
        end = worker.end()
        if end < float("inf"):
            self._push(end, (worker, worker.version))

    def _push(self, when: float, who: _Person | tuple[_Worker, int]) -> None:
        heapq.heappush(self._events, (when, next(self._order), who))


class _Person:
    def __init__(self, turns: Iterator[tuple[float, Asked]]) -> None:
        self._turns = turns
        self.asked: Asked

    def think(self) -> float:
        """Seconds; what is asked then is in `asked`."""
        seconds, self.asked = next(self._turns)
        return seconds

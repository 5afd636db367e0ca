"""The real router before simulated workers, and what a central index, tiers and roles would have done."""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pykvgraph.bench.cluster_simulation.caches import Caches, Index
from pykvgraph.bench.cluster_simulation.costs import Costs
from pykvgraph.bench.cluster_simulation.machine import CHUNK, Machine, SimulatedText
from pykvgraph.bench.cluster_simulation.traffic import SimulatedRequest, Traffic
from pykvgraph.cluster.prefixes import TOKEN_BYTES, Prefixes, TextBlock
from pykvgraph.cluster.router import PREFILL_BYTES, Router, Ticket, reader_for
from pykvgraph.stream.split import Roles, split_workers

POLICIES = ("router", "index", "load", "tiers", "roles")
N_SLOTS = 4
N_CELLS = 16_384  # tokens of a worker's cache
N_TIER = 4 * N_CELLS  # more, in its memory, with `tiers` and `roles`
BUSY = 0.7  # so many people ask that workers decode for this part of the time, or a little more
N_REQUESTS = 40  # for each worker, and at least LEAST_REQUESTS; of the first half nothing is told
LEAST_REQUESTS = 10_000
N_BEFORE = 6, 16  # turns of each person that are over at the beginning: some are amid a talk, some aren't
RECORD_TOKENS = 32  # are sent at a time
_SEED = 1
_LONG_TOKENS = PREFILL_BYTES // TOKEN_BYTES
_FEW, _MANY = 10, 200  # workers that show how many people are enough, and requests for each of them


_Turns = Iterator[tuple[float, SimulatedRequest]]


@dataclass(frozen=True)
class Outcome:
    """Of one run. n_readers: those of the workers that only read prompts. n_prompt: tokens of all prompts.
    n_cached: those that nobody had to decode. n_answer: tokens of all answers. long_seconds: of a request, on
    average, to decode what was said in it, where others may read it. seconds: that are told. choice_seconds:
    what a choice took on this machine, on average. busy: the part of the time in which workers have decoded
    or loaded. Of each request, in seconds: first: until its first token; token: each further one, on average;
    gap: the longest between two.
    """

    n_workers: int
    policy: str
    n_readers: int
    n_prompt: int
    n_cached: int
    n_answer: int
    long_seconds: float
    seconds: float
    choice_seconds: float
    busy: float
    first: tuple[float, ...]
    token: tuple[float, ...]
    gap: tuple[float, ...]

    @property
    def hits(self) -> float:
        """The part of the prompts that caches had."""
        return self.n_cached / self.n_prompt

    @property
    def tokens_per_second(self) -> float:
        """Of answers, of all workers together."""
        return self.n_answer / self.seconds


def simulate(costs: Costs, n_workers: int, n_people: int, policy: str, least: int | None = None) -> Outcome:
    """n_people: for each worker. policy, one of POLICIES: the router with its own prefixes; with a central
    index of all caches; by load alone; the router before workers with tiers; and with tiers and roles, for
    which at least two workers are needed. least: requests, however few the workers are; None: LEAST_REQUESTS.
    """
    roles = _roles(costs, n_workers, n_people) if policy == "roles" else Roles(0, n_workers)
    n_requests = max(N_REQUESTS * n_workers, LEAST_REQUESTS if least is None else least)
    collects = gc.isenabled()
    gc.disable()  # it would look at millions of blocks again and again: a third of the time
    try:
        return _Simulation(costs, roles, n_people, policy).run(n_requests)
    finally:
        if collects:
            gc.enable()
            gc.collect()


def people_for(costs: Costs) -> int:
    """How many people for each worker keep workers BUSY."""

    def is_enough(n_people: int) -> bool:
        return simulate(costs, _FEW, n_people, "router", _FEW * _MANY).busy >= BUSY

    high = 1
    while not is_enough(high):
        high *= 2
    low = high // 2  # is not enough
    while high - low > max(low // 10, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _roles(costs: Costs, n_workers: int, n_people: int) -> Roles:
    """The split with which neither waits for the other, by what workers without roles do.

    Short prompts are read by those that decode, so they count as a part of the answers.
    """
    usual = simulate(costs, _FEW, n_people, "tiers", _FEW * _MANY)
    n = len(usual.first)
    n_answer = usual.n_answer / n
    all_seconds = usual.busy * usual.seconds * _FEW / n
    reading = max(usual.long_seconds, 1e-6)
    decoding = max(all_seconds - reading, 1e-6)
    return split_workers(n_workers, reading, decoding / n_answer, n_answer)


class _SimulatedWorker(Machine):
    """cells: what has cells. held: what has cells, or is in the worker's memory."""

    def __init__(self, number: int, costs: Costs, cells: Caches, held: Caches) -> None:
        super().__init__(costs.times, N_SLOTS)
        self.number = number
        self.version = 0  # of its plan
        self._costs = costs
        self._cells = cells
        self._held = held

    def cached(self, text: SimulatedText) -> tuple[int, float]:
        n = self._held.n_cached(self.number, text.asked)
        n_cells = self._cells.n_cached(self.number, text.asked)
        return n, self._costs.loading(max(n - n_cells, 0))

    def has(self, asked: SimulatedRequest, n_said: int) -> None:
        """This prompt, and n_said tokens of the answer, have cells now."""
        self._cells.store(self.number, asked, n_said)
        if self._held is not self._cells:
            self._held.store(self.number, asked, n_said)


class _Simulation:
    def __init__(self, costs: Costs, roles: Roles, n_people: int, policy: str) -> None:
        self._policy = policy
        self._costs = costs
        self._roles = roles
        n_tokens = N_CELLS + (N_TIER if policy in ("tiers", "roles") else 0)
        self._cells = Caches(N_CELLS)
        self._held = Caches(n_tokens) if n_tokens > N_CELLS else self._cells
        self._prefixes = Index(self._cells) if policy == "index" else Prefixes()
        # the first workers talk, and the others only read
        self._router, self._readers = Router(N_SLOTS, self._prefixes), Router(N_SLOTS)
        self._workers = [_SimulatedWorker(i, costs, self._cells, self._held) for i in range(sum(roles))]
        for worker in self._workers:
            router = self._router if worker.number < roles.decode else self._readers
            router.add(worker.number, n_tokens)
        self._traffic = Traffic(_SEED)
        self._n_people = n_people * len(self._workers)
        self._order = itertools.count()
        # (when, which came first, what happens then)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        # what follows when they are answered
        self._open: dict[SimulatedText, Callable[[SimulatedText, float], None]] = {}
        self._done: list[SimulatedText] = []
        self._now = 0.0
        self._choosing = 0.0
        self._n_chosen = 0

    def run(self, n_requests: int) -> Outcome:
        """Until so many have been answered."""
        for number in range(self._n_people):
            self._join(number)
        self._until(n_requests // 2)
        warm, n_warm, busy = self._now, len(self._done), self._busy()
        self._until(n_requests)
        told = self._done[n_warm:]
        seconds = self._now - warm
        # one that only reads has the instruction in nearly all cases, and in nearly none what was said
        lacking = [(text.asked.talk.n_tokens, text.n_prompt - text.n_cached) for text in told]
        long = [n for n, n_lacking in lacking if n_lacking >= _LONG_TOKENS and n <= 2 * n_lacking]
        return Outcome(
            len(self._workers),
            self._policy,
            self._roles.prefill,
            sum(text.asked.n_prompt for text in told),
            sum(text.n_cached for text in told),
            sum(text.n_answer for text in told),
            sum(self._costs.times.prefill(1, n, CHUNK) for n in long) / len(told),
            seconds,
            self._choosing / self._n_chosen,
            (self._busy() - busy) / seconds,
            tuple(text.first - text.came for text in told),
            tuple(text.token_seconds for text in told),
            tuple(text.gap for text in told),
        )

    def _until(self, n_done: int) -> None:
        while len(self._done) < n_done:
            self._now, _, happens = heapq.heappop(self._events)
            happens(self._now)

    def _busy(self) -> float:
        return statistics.fmean(worker.seconds_busy for worker in self._workers)

    def _join(self, number: int) -> None:
        """A person comes, of whom a worker has what was said before, so that caches are warm."""
        turns = self._traffic.person(number)
        for _ in range(random.Random(number).randint(*N_BEFORE)):
            _, asked = next(turns)
        had = number % self._roles.decode
        self._router.enter(had, asked.blocks, 0).leave()
        self._workers[had].has(asked, asked.n_answer)
        self._think(turns, 0.0)

    def _think(self, turns: _Turns, now: float) -> None:
        seconds, asked = next(turns)
        self._push(now + seconds, partial(self._ask, turns, asked))

    def _ask(self, turns: _Turns, asked: SimulatedRequest, now: float) -> None:
        begin = time.perf_counter()
        blocks: tuple[TextBlock, ...] = () if self._policy == "load" else asked.blocks
        number = self._router.choose(blocks)
        assert number is not None
        reader = reader_for(number, blocks, self._router, self._readers) if self._roles.prefill else None
        ticket = self._router.enter(number, blocks, (asked.n_prompt + asked.n_answer) * TOKEN_BYTES)
        self._choosing += time.perf_counter() - begin
        self._n_chosen += 1
        text = SimulatedText(asked, now, asked.n_prompt, asked.n_answer)
        self._open[text] = partial(self._is_answered, turns, ticket)
        if reader is None:
            self._enter(number, text, now)
        else:
            self._read(text, number, reader, now)

    def _read(self, text: SimulatedText, number: int, reader: int, now: float) -> None:
        """Another worker reads the prompt."""
        asked = text.asked
        ticket = self._readers.enter(reader, asked.blocks, asked.n_prompt * TOKEN_BYTES)
        reading = SimulatedText(asked, now, asked.n_prompt, 1)
        self._open[reading] = partial(self._is_read, text, number, ticket)
        self._enter(reader, reading, now)

    def _is_read(
        self, text: SimulatedText, number: int, ticket: Ticket, reading: SimulatedText, now: float
    ) -> None:
        """What the worker that answers lacks travels to its memory."""
        ticket.leave()
        text.n_cached = reading.n_cached - reading.n_prompt  # what was decoded isn't cached
        n_sent = text.n_prompt - self._held.n_cached(number, text.asked)
        # what has been decoded is sent while the rest is decoded
        sent = max(text.came + self._costs.sending(n_sent), now + self._costs.sending(RECORD_TOKENS))
        self._push(sent, partial(self._arrive, number, text))

    def _arrive(self, number: int, text: SimulatedText, now: float) -> None:
        self._held.store(number, text.asked)
        self._enter(number, text, now)

    def _is_answered(self, turns: _Turns, ticket: Ticket, text: SimulatedText, now: float) -> None:
        ticket.leave()
        self._done.append(text)
        self._think(turns, now)

    def _enter(self, number: int, text: SimulatedText, now: float) -> None:
        worker = self._workers[number]
        worker.enter(text, now)
        self._plan(worker)

    def _end_phase(self, worker: _SimulatedWorker, version: int, now: float) -> None:
        if version != worker.version:
            return  # it has been planned anew
        read, answered = worker.step()
        if read:
            worker.has(read.asked, 0)
        for text in answered:
            worker.has(text.asked, text.n_answer)
            self._open.pop(text)(text, now)
        self._plan(worker)

    def _plan(self, worker: _SimulatedWorker) -> None:
        worker.version += 1
        end = worker.end()
        if end < math.inf:
            self._push(end, partial(self._end_phase, worker, worker.version))

    def _push(self, when: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happens))

"""Waiting texts enter: they get a sequence, and what the cells and the tiers have of them."""

from __future__ import annotations

from collections import Counter

from pykvgraph.engine.admission import Admission
from pykvgraph.engine.beginnings import is_coming, mark_partings
from pykvgraph.engine.fetches import Fetches
from pykvgraph.engine.moved_parts import attach_moved
from pykvgraph.engine.readings import Readings
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix.index import Found
from pykvgraph.sequence.sequence import EVERY


class Entry:
    """Lets texts enter while there are sequences and cells for them.

    fetches: what loads prefixes from tiers; None: there are no tiers. spacing: tokens from one spare resume
    point of a prompt to the next; 0: they are where steps end anyhow. reuse: parts of at least so many tokens
    are moved; 0: none are. counts: gets prompt_tokens, prefix_hit_tokens and decoded_again.
    """

    def __init__(
        self,
        running_set: RunningSet,
        admission: Admission,
        readings: Readings,
        fetches: Fetches | None,
        *,
        spacing: int,
        reuse: int,
        counts: Counter[str],
    ) -> None:
        self._running_set = running_set
        self._scheduler = running_set.scheduler
        self._admission = admission
        self._readings = readings
        self._fetches = fetches
        self._spacing = spacing
        self._reuse = reuse
        self._counts = counts

    def admit(self) -> None:
        """Waiting texts enter, in their order."""
        if self._readings.waits_for_cells:
            return
        scheduler, shares = self._scheduler, self._running_set.shares
        needs_points = self._running_set.needs_points
        first = scheduler.waiting.first()
        if needs_points and shares:
            mark_partings(first, scheduler.running)
        for sequence in first:
            if sequence.request.done:  # its rows were lost while others entered
                continue
            if sequence.n_seqs > scheduler.n_free_seqs:
                return
            if sequence.own is not None:
                fits = self._admission.fits(scheduler.running, sequence, 0)
                if not (fits and self._running_set.put_back(sequence, sequence.own)):
                    return
                continue
            found = self._find(sequence)
            if shares and is_coming(sequence, found.n, scheduler.running, needs_points):
                continue
            if self._enter(sequence, found):
                continue
            if scheduler.running or self._readings.has_begun:
                return
            self._running_set.index.clear()  # it fits an empty cache: submit() has seen to that
            self._enter(sequence, self._find(sequence))

    def take_fetched(self) -> None:
        """Texts go on behind what has come from outside the cells; else with what the cells have."""
        if self._fetches is None:
            return
        for sequence, fetch in self._fetches.finished():
            if self._fetches.show(sequence, fetch, self._running_set):
                sequence.begin(fetch.plan.n)
                self._begin(sequence, fetch.plan.n, fetch.plan.known)
            else:
                found = self._attached_again(sequence)
                self._begin(sequence, found.n, min(found.match.n, len(sequence.ids) - 1))

    def _find(self, sequence: RequestSequence) -> Found:
        """What the cache has of it; but for the last token, which is decoded for its output."""
        ids = sequence.ids if self._running_set.shares else sequence.ids[:0]
        return self._running_set.index.find(ids, len(sequence.ids) - 1, sequence.salt)

    def _enter(self, sequence: RequestSequence, found: Found) -> bool:
        """It runs, if its cells will be there."""
        running = self._scheduler.running
        if not self._admission.fits(running, sequence, found.n):
            return False
        plan = self._fetches.plan(sequence.ids, sequence.salt, found) if self._fetches else None
        known = min(found.match.n, len(sequence.ids) - 1)
        self._scheduler.enter(sequence)
        found = self._attached(sequence, plan.found if plan else found, moves=plan is None)
        if not self._admission.fits(running, sequence, found.n):
            self._running_set.release(sequence)
            self._scheduler.leave(sequence)
            self._scheduler.wait(sequence)
            return False
        if self._fetches and plan:
            if found.n == plan.found.n and self._fetches.start(sequence, plan, self._running_set):
                return True
            found = self._attached_again(sequence)
        self._begin(sequence, found.n, known)
        return True

    def _begin(self, sequence: RequestSequence, n: int, known: int) -> None:
        """It has n tokens of its text, of which the cache knew more, perhaps, and decodes the rest."""
        if sequence.n_cached < 0:
            sequence.enter(n, max(known - n, 0))
            self._counts["prompt_tokens"] += sequence.n_prompt
            self._counts["prefix_hit_tokens"] += sequence.n_cached
            self._counts["decoded_again"] += sequence.n_again
        if self._running_set.needs_points and self._running_set.shares:
            for place in (*range(EVERY, len(sequence.ids), EVERY), len(sequence.ids) - 1, known):
                sequence.add_place(place)
            sequence.spacing = self._spacing

    def _attached_again(self, sequence: RequestSequence) -> Found:
        """Its sequence has what the cells have of it, and nothing else."""
        self._running_set.release(sequence)
        return self._attached(sequence, self._find(sequence), moves=True)

    def _attached(self, sequence: RequestSequence, found: Found, *, moves: bool) -> Found:
        """Its sequence has the most that can be had of it; returns what that is."""
        moves = moves and self._reuse > 0
        if moves and (n := attach_moved(self._running_set, sequence, found, self._reuse)):
            sequence.begin(n)
            return Found(found.match, n, None)
        if moves:
            found = self._find(sequence)  # room that was made for parts may have been of it
        index = self._running_set.index
        try:
            sequence.last = index.attach(found, sequence.seq)
        except (KVGraphError, MemoryError):  # what can't be shared is decoded
            found = Found(found.match, 0, None)
            sequence.last = index.attach(found, sequence.seq)
        sequence.begin(found.n)
        return found

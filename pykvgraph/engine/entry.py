"""Waiting texts enter: they get a sequence, and what the cells and the tiers have of them."""

from __future__ import annotations

from collections import Counter

from pykvgraph.engine.admission import Admission
from pykvgraph.engine.beginnings import is_coming, mark_partings
from pykvgraph.engine.cache_use import use_of
from pykvgraph.engine.compressed import CompressedPrefixes, Kept
from pykvgraph.engine.earlier_texts import EarlierTexts
from pykvgraph.engine.edits import Edit, Edits
from pykvgraph.engine.fetch import Plan
from pykvgraph.engine.fetches import Fetches
from pykvgraph.engine.own_rows import OwnRows
from pykvgraph.engine.prepared_text import PreparedText
from pykvgraph.engine.readings import Readings
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine.types import CacheUse
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix.block import N_TOKENS
from pykvgraph.prefix.match import Found
from pykvgraph.prefix.node import Root
from pykvgraph.sequence.sequence import EVERY

_TEXTS_SHARE = 4  # times the cells: tokens of earlier texts that are remembered


class Entry:
    """Lets texts enter while there are sequences and cells for them.

    fetches: what loads prefixes from tiers; None: there are no tiers. spacing: tokens from one spare resume
    point of a prompt to the next; 0: they are where steps end anyhow. reuse: see Edits. counts: gets
    prompt_tokens, prefix_hit_tokens, edited_tokens and decoded_again.
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
        compressed: CompressedPrefixes | None = None,
    ) -> None:
        self._running_set = running_set
        self._scheduler = running_set.scheduler
        self._admission = admission
        self._readings = readings
        self._fetches = fetches
        self._spacing = spacing
        n_cells = max((group.n_cells for group in running_set.kv.groups), default=0)
        self._texts = EarlierTexts(_TEXTS_SHARE * n_cells)
        self._edits = Edits(running_set, self._texts, reuse)
        self._counts = counts
        self._compressed = compressed

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
            if shares and sequence.forgets and sequence.n_cached < 0 and sequence.own is None:
                self._running_set.go_on(sequence)
            if sequence.own is not None:
                if not self._put_back(sequence, sequence.own):
                    return
                continue
            if self._compressed and self._compressed.is_coming(sequence, self._fits):
                continue
            found = self._find(sequence)
            kept = self._kept(sequence, found.n)
            n_there = kept.n if kept else found.n
            if shares and is_coming(sequence, n_there, scheduler.running, needs_points):
                continue
            if self._enter(sequence, found):
                continue
            if scheduler.running or self._readings.has_begun:
                return
            index = self._running_set.index
            index.clear()  # it fits an empty cache: submit() has seen to that
            while not self._enter(sequence, self._find(sequence)) and index.give_up_pin():
                pass

    def prepare(self, text: PreparedText) -> bool:
        """It runs, where nobody else does, behind what the cells have of it; False: it need not, or can't.

        It can't where they have lost more than what it has for itself: others needed them.
        """
        scheduler = self._scheduler
        text.is_old_under(each.salt for each in self._edits.under_salts(text))
        found = self._find(text)
        if self._running_set.index.find(text.ids, len(text.ids), text.salt).n == len(text.ids):
            return False
        scheduler.wait(text)
        if not self._enter(text, found):
            scheduler.waiting.remove(text)
            return False
        n_again = EVERY if self._running_set.needs_points else N_TOKENS  # behind a place to go on from
        if text.n_todo > len(text.ids) - text.n_common + n_again:
            self._running_set.leave(text)
            return False
        return True

    def take_fetched(self) -> None:
        """Texts go on behind what has come from outside the cells; else with what the cells have."""
        if self._fetches is None:
            return
        for sequence, fetch in self._fetches.finished():
            if self._fetches.show(sequence, fetch, self._running_set):
                sequence.begin(fetch.plan.n)
                self._begin(sequence, fetch.plan.known, plan=fetch.plan)
            else:
                self._attach_again(sequence)

    def _find(self, sequence: RequestSequence, *, loads: bool = True) -> Found:
        """What the cache has of it; but for the last token, which is decoded for its output.

        That is under its own salt, or under one that only edited texts of its session have. loads: whether
        what tiers have may be loaded then.
        """
        sequence.salt = sequence.exact_salt
        best = self._find_under(sequence, sequence.salt)
        texts = self._edits.under_salts(sequence)
        most = self._n_there(sequence, sequence.salt, best, loads) if texts else 0
        ids = sequence.ids.tobytes()
        for text in texts:
            found = self._find_under(sequence, text.salt)
            found.match.root.learn(text.n_exact, text.made_of)
            n = self._n_there(sequence, text.salt, found, loads) if text.common(ids) > most else found.n
            if n > most:
                best, sequence.salt, most = found, text.salt, n
        return best

    def _n_there(self, sequence: RequestSequence, salt: bytes, found: Found, loads: bool) -> int:
        """How many of its tokens need not be decoded, where the cells have that of it under a salt."""
        plan = self._plan(sequence, salt, found) if loads else None
        return plan.n if plan else found.n

    def _plan(self, sequence: RequestSequence, salt: bytes, found: Found) -> Plan | None:
        """What is worth loading, where the cells have that of it under a salt."""
        if self._fetches is None or isinstance(sequence, PreparedText):
            return None
        return self._fetches.plan(sequence.ids, salt, found, sequence.n_findable)

    def _find_under(self, sequence: RequestSequence, salt: bytes) -> Found:
        ids = sequence.ids if self._running_set.shares else sequence.ids[:0]
        return self._running_set.index.find(ids, sequence.n_findable, salt)

    def _enter(self, sequence: RequestSequence, found: Found) -> bool:
        """It runs, if its cells will be there."""
        running = self._scheduler.running
        kept = self._kept(sequence, found.n)
        if not self._admission.fits(running, sequence, kept.n if kept else found.n):
            return False
        if kept is not None:
            self._scheduler.enter(sequence)
            if self._is_shown(sequence, kept):
                return True
            self._scheduler.leave(sequence)
            self._scheduler.wait(sequence)
            return False
        plan = self._plan(sequence, sequence.salt, found)
        known = min(found.match.n, sequence.n_findable)
        self._scheduler.enter(sequence)
        edit = self._edits.best(sequence, plan.n if plan else found.n)
        if edit is not None:
            if self._edited(sequence, edit):
                return True
            found, plan = self._find(sequence, loads=False), None  # room that was made may have been of it
        found = self._attached(sequence, plan.found if plan else found)
        if not self._admission.fits(running, sequence, found.n):
            self._running_set.release(sequence)
            self._scheduler.leave(sequence)
            self._scheduler.wait(sequence)
            return False
        if self._fetches and plan:
            if found.n == plan.found.n and self._fetches.start(sequence, plan, self._running_set):
                return True
            self._attach_again(sequence)
        else:
            self._begin(sequence, known)
        return True

    def _fits(self, sequence: RequestSequence) -> bool:
        """Whether it could run if the cache had nothing of it."""
        return self._admission.fits(self._scheduler.running, sequence, 0)

    def _put_back(self, sequence: RequestSequence, own: OwnRows) -> bool:
        """It runs with its own rows, or can't have them; False: there is no room for them now."""
        index = self._running_set.index
        while not self._fits(sequence):
            if self._scheduler.running or self._readings.has_begun or not index.give_up_pin():
                return False
        if not self._running_set.put_back(sequence, own):
            return False
        if sequence.n_cached < 0:
            self._count_shortened(sequence)
        return True

    def _kept(self, sequence: RequestSequence, n_had: int) -> Kept | None:
        """The compressed prefix that it may begin with, where the cache has n_had of its tokens."""
        return self._compressed.best(sequence, n_had) if self._compressed else None

    def _is_shown(self, sequence: RequestSequence, kept: Kept) -> bool:
        """It runs behind a compressed prefix; False: it can't, and is empty."""
        if not (self._compressed and self._compressed.show(sequence, kept)):
            return False
        if not self._fits(sequence):
            self._running_set.release(sequence)
            return False
        self._begin(sequence, 0)
        return True

    def _edited(self, sequence: RequestSequence, edit: Edit) -> bool:
        """It runs as an earlier text with other tokens in its midst; False: it can't, and is empty."""
        if not self._edits.make(sequence, edit):
            return False
        if not self._fits(sequence):
            self._running_set.release(sequence)
            return False
        self._begin(sequence, 0, edit=edit)
        return True

    def _begin(
        self, sequence: RequestSequence, known: int, *, plan: Plan | None = None, edit: Edit | None = None
    ) -> None:
        """It has some tokens of its text, and decodes the rest. known: those that the cache had, perhaps.

        plan: what was loaded of it. edit: what it was made by.
        """
        root = sequence.last.root if sequence.last is not None else Root(sequence.salt)
        n, n_exact = sequence.n_there, root.n_exact
        if sequence.n_cached < 0:
            if self._running_set.shares:
                sequence.use = use_of(sequence, self._texts, plan, edit, n_exact=n_exact, known=known)
            sequence.enter(n, max(known - n, 0))
            if not isinstance(sequence, PreparedText):
                self._count_prompt(sequence)
                self._counts["edited_tokens"] += sequence.use.edited
                self._counts["decoded_again"] += sequence.n_again
        if self._compressed is not None and not isinstance(sequence, PreparedText):
            self._compressed.note(sequence)
        if self._running_set.shares:
            self._tell_others(sequence, root)
        if self._running_set.needs_points and self._running_set.shares:
            pinned = [pin.n_tokens // N_TOKENS * N_TOKENS for pin in sequence.pins]
            for place in (*range(EVERY, len(sequence.ids), EVERY), len(sequence.ids) - 1, known, *pinned):
                sequence.add_place(place)
            sequence.spacing = self._spacing

    def _count_shortened(self, sequence: RequestSequence) -> None:
        """It runs for the first time, behind what an earlier text has left."""
        if sequence.runs:
            n = len(sequence.read_ids())
            sequence.use = CacheUse(cells=n)
            sequence.enter(n, 0)
            self._count_prompt(sequence)

    def _count_prompt(self, sequence: RequestSequence) -> None:
        """It runs for the first time."""
        self._counts["prompt_tokens"] += sequence.n_prompt
        self._counts["prefix_hit_tokens"] += sequence.n_cached

    def _tell_others(self, sequence: RequestSequence, root: Root) -> None:
        """Later texts may be edits of this one, or of its forks."""
        for each in (sequence, *sequence.forks):
            each.salt, each.order = sequence.salt, sequence.order
            each.earlier = each.known_as()
            each.earlier.n_exact, each.earlier.made_of = root.n_exact, root.made_of
            self._texts.add(each.earlier)

    def _attach_again(self, sequence: RequestSequence) -> None:
        """It begins with what the cells have of it, and nothing else."""
        self._running_set.release(sequence)
        found = self._find(sequence, loads=False)
        edit = self._edits.best(sequence, found.n)
        if edit is not None:
            if self._edited(sequence, edit):
                return
            found = self._find(sequence, loads=False)  # room that was made may have been of it
        found = self._attached(sequence, found)
        self._begin(sequence, min(found.match.n, sequence.n_findable))

    def _attached(self, sequence: RequestSequence, found: Found) -> Found:
        """Its sequence has what was found, or what can be had of it; returns what that is."""
        index = self._running_set.index
        try:
            sequence.last = index.attach(found, sequence.seq)
        except (KVGraphError, MemoryError):  # what can't be shared is decoded
            found = Found(found.match, 0, None)
            sequence.last = index.attach(found, sequence.seq)
        sequence.begin(found.n)
        return found

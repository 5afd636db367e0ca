"""Prefixes that many texts begin with, in fewer cells: in idle time the engine keeps their best part, too."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from pykvgraph.context.cell_scores import POLICIES, TextCells
from pykvgraph.context.context import Context
from pykvgraph.context.document import require_holdable
from pykvgraph.context.forgetting import N_SINKS, drop, lowest, may_go
from pykvgraph.context.repetition import Repetition, n_cells_of_part, n_of_part
from pykvgraph.context.second_reading import require_attention
from pykvgraph.engine.compressed_records import CompressedRecords
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.errors import KVGraphError
from pykvgraph.model.adapter import Active
from pykvgraph.prefix import block
from pykvgraph.prefix.node import ALL, Origin
from pykvgraph.tiers.record import Name

N_KEPT = 4  # compressed prefixes at a time; each has a sequence of the cache
LEAST = 512  # tokens of a prefix: shorter ones are read soon
_N_USES = 2  # texts that found it in the cache
_N_AT_ONCE = 4  # tokens that are read between two looks at whether somebody has come
_LEAST_PART = 64  # tokens that there must be room for
_N_NOTED = 16  # prefixes that wait for their turn


class Prefix(NamedTuple):
    """What many texts begin with. salt: under which the index has it."""

    ids: array[int]
    salt: bytes
    adapters: Active

    @property
    def origin(self) -> Origin:
        """Of what is made of it."""
        return Origin(self.salt, self.ids)

    @property
    def compressed_salt(self) -> bytes:
        """Of texts that begin with its compressed form: nobody else finds their cells."""
        return block.edited(self.salt, b"compressed", self.ids.tobytes(), b"", 0)


class Kept(NamedTuple):
    """A prefix of which a sequence has the best cells. n_exact: its tokens before the first without one."""

    prefix: Prefix
    seq: int
    n_exact: int

    @property
    def n(self) -> int:
        """Its tokens, with cells or without."""
        return len(self.prefix.ids)


class CompressedPrefixes:
    """Reads prefixes once more (KVzip, arXiv:2505.23416), and keeps a share of their cells for who asks.

    Which: those that two texts found in the cache and that have 512 tokens or more, and those that are pinned
    and have as many. share: how much of a prefix is kept. The compressed form has a sequence of its own, and
    costs no cell that the index has for the whole one. It is given up when everything in the index has been.

    Raises UnsupportedError where it isn't known what tokens attend to, and for layers with windows or states.
    """

    def __init__(
        self, ctx: Context, running_set: RunningSet, share: float, records: CompressedRecords | None = None
    ) -> None:
        require_attention(ctx)
        require_holdable(ctx.kv, False)
        self._ctx = ctx
        self._running_set = running_set
        self._share = share
        self._records = records
        self._free = [running_set.scheduler.borrow() for _ in range(N_KEPT)]
        self._noted: OrderedDict[bytes, Prefix] = OrderedDict()
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()  # by salt; the first was used longest ago
        self._job: _Reread | None = None
        self._index = running_set.index
        running_set.gives_up = self.give_up
        running_set.forgets_made_of = self.forget

    @property
    def has_work(self) -> bool:
        """Whether a prefix is being read, or waits."""
        return self.n_left > 0

    @property
    def n_left(self) -> int:
        """Prefixes that are being read, or wait."""
        return len(self._noted) + (self._job is not None)

    @property
    def n_kept(self) -> int:
        """Prefixes that are compressed."""
        return len(self._kept)

    def note(self, sequence: RequestSequence) -> None:
        """A text has begun: what it found in the cache may be worth it now."""
        last = sequence.last
        if last is None or last.root.n_exact != ALL or sequence.salt != sequence.exact_salt:
            return
        n = max((pin.n_tokens for pin in sequence.pins), default=0)
        for node in last.path():
            node.n_found += 1
            if node.n_found >= _N_USES:
                n = max(n, node.end)
        if n >= LEAST:
            prefix = Prefix(sequence.ids[:n], sequence.salt, sequence.adapters)
            salt = prefix.compressed_salt
            is_there = salt in self._kept or (self._records and self._records.has(prefix.ids, prefix.salt))
            if not is_there and (self._job is None or self._job.prefix != prefix):
                self._noted[salt] = prefix
            while len(self._noted) > _N_NOTED:
                self._noted.popitem(last=False)

    def best(self, sequence: RequestSequence, n_had: int) -> Kept | None:
        """The longest that a text which asks for one begins with, unless the cache has much more of it.

        n_had: how much that is.
        """
        if not _may_have(sequence):
            return None
        self._lose()
        found = [each for each in self._kept.values() if _begins(sequence, each)]
        kept = max(found, key=lambda each: each.n, default=None)
        return kept if kept is not None and n_had < kept.n + LEAST else None

    def is_coming(self, sequence: RequestSequence, fits: Callable[[RequestSequence], bool]) -> bool:
        """Whether the text should wait: one that best() would like more is on its way from the tiers.

        One that has come is kept from now on, as if it had just been read. fits: whether there are as many
        cells as the text would take without.
        """
        if self._records is None or not _may_have(sequence):
            return False
        self._lose()
        n_had = self._index.find(sequence.ids, len(sequence.ids) - 1, sequence.exact_salt).n
        kept = self.best(sequence, n_had)
        name = self._records.longest(sequence.ids, sequence.exact_salt, n_had)
        if name is None or (kept and kept.n >= name.span.stop):
            return False
        if self._records.is_coming(name, n_had):
            return True
        if fits(sequence) and self._index.make_room(name.span.stop):
            self._load(name, sequence)
        return False

    def show(self, sequence: RequestSequence, kept: Kept) -> bool:
        """Its empty sequence gets the cells; False: it can't, and is empty."""
        salt = kept.prefix.compressed_salt
        if salt not in self._kept:  # room was made meanwhile
            return False
        try:
            self._running_set.kv.seq_cp(kept.seq, sequence.seq, -1, -1)
        except (KVGraphError, MemoryError):
            self._running_set.kv.seq_rm(sequence.seq, -1, -1)
            return False
        self._kept.move_to_end(salt)
        sequence.edit(salt, kept.n, ())
        sequence.has_holes = True
        of = Origin(kept.prefix.salt, kept.prefix.ids)
        sequence.last = self._running_set.index.begin(salt, kept.n_exact, (of,))
        return True

    def read_part(self) -> None:
        """Reads some tokens of the prefix whose turn it is; one that fails isn't tried again."""
        self._lose()
        try:
            if self._job is None:
                self._begin()
                return
            self._make_room(self._job.repetition.n_next)
            if self._job.read():
                self._finish(self._job)
        except (KVGraphError, MemoryError):
            self._drop_job()
            self._running_set.start_over_if_broken()

    def give_way(self) -> None:
        """Somebody has come: the cells that only the reading needs are empty."""
        if self._job is not None:
            self._lose()
        if self._job is not None:
            self._job.repetition.give_up()

    def give_up(self) -> bool:
        """Others may have the cells of what is being read, or was used longest ago; False: there is none.

        What is given up goes to the tiers, where it is already unless that had made way, too.
        """
        if self._job is not None:
            self._drop_job()
            return True
        if not self._kept:
            return False
        _, kept = self._kept.popitem(last=False)
        self._save(kept)
        self._empty(kept.seq)
        return True

    def forget(self, ids: array[int], salt: bytes) -> None:
        """Gives up what is made of a text's first tokens, or was to be."""
        if self._job is not None and self._job.prefix.origin.begins(ids, salt):
            self._drop_job()
        for kept in [each for each in self._kept.values() if each.prefix.origin.begins(ids, salt)]:
            del self._kept[kept.prefix.compressed_salt]
            self._empty(kept.seq)
        for key in [key for key, prefix in self._noted.items() if prefix.origin.begins(ids, salt)]:
            del self._noted[key]

    def _begin(self) -> None:
        """With the prefix that waits longest, if the cache still has it, and room for a part of it."""
        _, prefix = self._noted.popitem(last=False)
        index, n = self._running_set.index, len(prefix.ids)
        found = index.find(prefix.ids, n, prefix.salt)
        if found.n < n:
            return
        self._make_room(n_cells_of_part(self._ctx))
        n_part = n_of_part(self._ctx, n)
        found = index.find(prefix.ids, n, prefix.salt)  # room that was made may have been of it
        if found.n < n or n_part < _LEAST_PART:
            return
        if not self._free:
            self.give_up()
        seq = self._free.pop()
        try:
            index.unpin(index.attach(found, seq))  # the sequence sees the cells, and so they stay
            self._job = _Reread(self._ctx, prefix, seq, n_part)
        except BaseException:
            self._empty(seq)
            raise

    def _make_room(self, n: int) -> None:
        """For n tokens: what was used longest ago makes way, as much of it as takes n cells and no more."""
        for _ in range(-(-n // block.N_TOKENS)):
            if self._ctx.kv.n_free >= n or not self._index.evict_oldest():
                return

    def _finish(self, job: _Reread) -> None:
        """The sequence keeps the best of its cells."""
        text = TextCells(self._ctx, job.seq)
        text.repeated = job.repetition.peaks
        candidates = may_go(text, N_SINKS, shared=True)
        n_most = int(text.n_cells[candidates].sum())
        n_cells = min(round((1 - self._share) * len(job.prefix.ids)), n_most)
        n_exact = len(job.prefix.ids)
        if n_cells:
            places = lowest(text, candidates, POLICIES["kvzip"].score(text), n_cells)
            drop(self._ctx.kv, job.seq, places)
            n_exact = int(places[0])
        kept = Kept(job.prefix, job.seq, n_exact)
        self._kept[job.prefix.compressed_salt], self._job = kept, None
        self._save(kept)

    def _save(self, kept: Kept) -> None:
        if self._records is not None and self._index is self._running_set.index:
            self._records.save(kept.prefix.ids, kept.prefix.salt, kept.seq)

    def _load(self, name: Name, sequence: RequestSequence) -> None:
        """From the tiers into a sequence of its own, with what the text begins with; or it can't be had."""
        assert self._records is not None
        if not self._free:
            self.give_up()
        seq = self._free.pop()
        n_exact = self._records.load(name, seq)
        if n_exact is None:
            self._empty(seq)
            self._running_set.start_over_if_broken()
            return
        prefix = Prefix(sequence.ids[: name.span.stop], sequence.exact_salt, sequence.adapters)
        self._kept[prefix.compressed_salt] = Kept(prefix, seq, n_exact)

    def _drop_job(self) -> None:
        if self._job is not None:
            job, self._job = self._job, None
            self._empty(job.seq)

    def _empty(self, seq: int) -> None:
        self._running_set.kv.seq_rm(seq, -1, -1)
        self._free.append(seq)

    def _lose(self) -> None:
        """All of it where the cache was cleared, after a device has failed."""
        if self._index is not self._running_set.index:
            self._index = self._running_set.index
            while self.give_up():
                pass


class _Reread:
    """A prefix that is read once more, in a sequence that has its cells."""

    def __init__(self, ctx: Context, prefix: Prefix, seq: int, n_part: int) -> None:
        self.prefix = prefix
        self.seq = seq
        self.repetition = Repetition(ctx, seq, prefix.ids, n_part)
        self._ctx = ctx

    def read(self) -> bool:
        """Some tokens; whether that was all."""
        self._ctx.set_adapters(self.prefix.adapters)
        self.repetition.read(min(self.repetition.n_next, _N_AT_ONCE, self._ctx.n_ubatch))
        return not self.repetition.n_left


def _may_have(sequence: RequestSequence) -> bool:
    """Whether it asks for one. Who began without goes on without, and so does a text with a window."""
    began_without = sequence.n_cached >= 0 and not sequence.use.edited
    return sequence.terms.compressed and sequence.window is None and not began_without


def _begins(sequence: RequestSequence, kept: Kept) -> bool:
    is_same = kept.prefix.salt == sequence.exact_salt
    return is_same and kept.n < len(sequence.ids) and sequence.ids[: kept.n] == kept.prefix.ids

"""Texts that run and end, a step at a time, with cells that are only numbers: what Admission speaks of."""

from __future__ import annotations

import itertools
import random
from array import array
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from pykvgraph.context.context import LastOutput
from pykvgraph.engine.admission import Admission
from pykvgraph.engine.beam_sequence import BeamSequence
from pykvgraph.engine.context_window import Window
from pykvgraph.engine.reading import Reading
from pykvgraph.engine.request import Request
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.scheduler import Scheduler
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.params.params import SamplingParams
from pykvgraph.plan.memory_model import SPECULATION_SHARE
from support import chance


def text(n_prompt: int, max_tokens: int, n: int = 1, window: Window | None = None) -> RequestSequence:
    """A request's first sample, with the others as its forks."""
    request = Request(n, lambda _: None)
    params = SamplingParams(max_tokens=max_tokens, n=n)
    prompt = np.arange(n_prompt, dtype=np.int32)
    samples = [RequestSequence(request, i, prompt, params, None, b"", window) for i in range(n)]
    samples[0].forks = samples[1:]
    return samples[0]


N_VOCAB = 6  # of what beams say


class NaiveEngine:
    """n_ctx cells, of which every sequence has a list; one that nobody has is free.

    window: with a second group of equally many cells, where a token attends to so many positions. least: the
    tokens of prompts in a step are a random number from this one up to n_most.
    """

    def __init__(
        self, n_ctx: int, n_seq_max: int, n_batch: int, least: int, window: int = 0, seed: int = 0
    ) -> None:
        self.rng = random.Random(chance.seed(seed))
        self.n_ctx, self.n_batch, self.least, self.window = n_ctx, n_batch, least, window
        self.n_most = n_batch  # tokens of prompts in a step
        self.drafts = False
        self.scheduler = Scheduler(n_seq_max, n_batch)
        groups = [("full", 0), ("window", window)][: 1 + bool(window)]
        self.cells: list[list[list[int]]] = [[[] for _ in range(n_seq_max)] for _ in groups]
        self._new = itertools.count()
        kv = SimpleNamespace(
            groups=[SimpleNamespace(kind=kind, n_cells=n_ctx, window=w) for kind, w in groups],
            cells=lambda number: SimpleNamespace(seq=self._seq(number)),
        )
        ctx: Any = SimpleNamespace(
            kv=kv, swa_full=False, n_seq_max=n_seq_max, n_batch=n_batch, n_ubatch=n_batch
        )
        self.admission = Admission(ctx, bool(window), False, least)

    def enter(self, new: RequestSequence, like: RequestSequence | None = None, n_found: int = 0) -> bool:
        """Whether it is admitted; with so many cells of a running text, if one is given."""
        running = self.scheduler.running
        if new.n_seqs > self.scheduler.n_free_seqs or not self.admission.fits(running, new, n_found):
            return False
        self.scheduler.arrive(new)
        self.scheduler.enter(new)
        for group, cells in enumerate(self.cells):
            if like is not None:
                own = group == 1 and self.rng.random() < 0.5  # decoded again by somebody who has left
                found = cells[like.seq][:n_found]
                cells[new.seq] = [next(self._new) for _ in found] if own else list(found)
        new.begin(n_found)
        if self.admission.fits(running, new, n_found):
            return True
        self.leave(new)
        return False

    def beams(self, n_prompt: int, max_tokens: int, width: int) -> BeamSequence:
        """A request that is answered by a search."""
        params = SamplingParams(max_tokens=max_tokens, beam_width=width)
        prompt, kv = np.arange(n_prompt, dtype=np.int32), cast(KVCache, self)
        return BeamSequence(Request(1, lambda _: None), prompt, params, None, b"", kv)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """As KVCache's, of the whole sequence."""
        for cells in self.cells:
            cells[seq] = []

    def seq_cp(self, source: int, target: int, p0: int, p1: int) -> None:
        """As KVCache's, of the whole sequence."""
        for cells in self.cells:
            cells[target] = list(cells[source])

    def begin_reading(self, n_tokens: int) -> bool:
        """Whether a text is read from now on, a part before each step."""
        reading = Reading(array("i", [0] * n_tokens), (), lambda begin, end: None, lambda: True)
        if self.admission.reading or not self.scheduler.n_free_seqs:
            return False
        if not self.admission.begin_reading(self.scheduler.running, reading):
            return False
        reading.seq = self.scheduler.borrow()
        return True

    def _read_part(self, reading: Reading) -> None:
        n = reading.n_next(self.rng.randint(self.least, max(self.least, self.n_most)))
        for group, cells in enumerate(self.cells):
            assert self.n_in_use(group) + n <= self.n_ctx, "no cells for a part of a text that is read"
            cells[reading.seq] += [next(self._new) for _ in range(n)]
        reading.n_read += n
        if not reading.n_left:
            for cells in self.cells:
                cells[reading.seq] = []
            self.scheduler.give_back(reading.seq)
            self.admission.reading = None

    def leave(self, sequence: RequestSequence) -> None:
        for seq in (sequence.seq, *sequence.fork_seqs):
            self.seq_rm(seq, -1, -1)
        self.scheduler.leave(sequence)

    def n_in_use(self, group: int = 0) -> int:
        window = self.window if group else 2**31
        return len({cell for each in self.cells[group] for cell in each[-window:]})

    def step(self) -> list[RequestSequence]:
        """The most cells are in use before anybody ends; returns who has then ended."""
        if self.admission.reading:
            self._read_part(self.admission.reading)
        for sequence in self.scheduler.running:
            if sequence.window and sequence.decodes and sequence.window.is_full(sequence.n_decoded):
                self._shift(sequence, sequence.window.discarded(sequence.n_decoded))
        n_decoding = sum(each.decodes for each in self.scheduler.running)
        n_at_least = self.least if n_decoding else self.n_batch
        chunks = self.scheduler.chunks(self.rng.randint(n_at_least, max(n_at_least, self.n_most)))
        self.scheduler.count_idle(chunks)
        n_new = sum(chunk.n_rows for chunk in chunks)
        drafts = self._drafts(n_new) if self.drafts and chunks else {}
        for group in range(len(self.cells)):
            assert self.n_in_use(group) + n_new + sum(drafts.values()) <= self.n_ctx, "no cells for a step"
        for sequence, n, *_ in chunks:
            n_accepted = self.rng.randint(0, drafts.get(sequence.seq, 0))
            sequence._n_said += n_accepted
            sequence.ids.extend([1] * n_accepted)
            seqs = [tip.seq for tip in sequence.tips] if sequence.decodes else [sequence.seq]
            for cells in self.cells:
                for seq in seqs:
                    cells[seq] += [next(self._new) for _ in range(n + n_accepted)]
            sequence.n_decoded += n + n_accepted
        ended: list[RequestSequence] = []
        for sequence in [chunk.sequence for chunk in chunks if chunk.ends]:
            if isinstance(sequence, BeamSequence):
                # mostly each beam goes on: they need the most cells then
                is_sure = sequence.n_rows > 1 and self.rng.random() < 0.95
                if sequence.say([self._output(is_sure) for _ in range(sequence.n_rows)], 0.0):
                    ended.append(sequence)
                continue
            for each in (sequence, *self.scheduler.fork(sequence)):
                if each is not sequence:
                    each.follow(sequence)
                    for cells in self.cells:
                        cells[each.seq] = list(cells[sequence.seq])
                each.ids.append(1)
                each._n_said += 1
                if not each.n_may_say:
                    ended.append(each)
        for each in ended:
            self.leave(each)
        return ended

    def _output(self, is_sure: bool) -> LastOutput:
        row = np.array([self.rng.gauss(0, 1) for _ in range(N_VOCAB)], np.float32)
        row[0] += 99 * is_sure
        return LastOutput(int(row.argmax()), 0.0, float(np.logaddexp.reduce(row)), row)

    def _drafts(self, n_new: int) -> dict[int, int]:
        """The tokens of drafts that each sequence decodes."""
        found = {}
        room = max(self.admission.room_for_drafts(self.scheduler.running, n_new, SPECULATION_SHARE), 0)
        for each in self.scheduler.running:
            if each.decodes and each.n_seqs == 1 and each.window is None:
                found[each.seq] = self.rng.randint(0, min(room, each.n_may_say - 1))
                room -= found[each.seq]
        return found

    def _shift(self, sequence: RequestSequence, gone: range) -> None:
        """Cells behind those that go are copied, where others see them."""
        sequence.discard(gone.start, gone.stop)
        for cells in self.cells:
            had, others = cells[sequence.seq], [each for i, each in enumerate(cells) if i != sequence.seq]
            seen = {cell for each in others for cell in each}
            moved = [next(self._new) if cell in seen else cell for cell in had[gone.stop :]]
            cells[sequence.seq] = had[: gone.start] + moved

    def _seq(self, number: int) -> Any:
        known = sorted({cell for each in self.cells[number] for cell in each})
        seq = np.zeros((max(len(known), 1), len(self.cells[number])), np.bool_)
        for s, cells in enumerate(self.cells[number]):
            seq[np.searchsorted(known, cells), s] = True
        return seq

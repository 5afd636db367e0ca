"""Speculation: tokens that may come next are decoded beside the last one, and those that come are kept."""

from __future__ import annotations

import time
from collections.abc import Callable

from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.scheduler import Chunk
from pykvgraph.engine.speculation.drafters import Drafter
from pykvgraph.engine.speculation.gate import Gate

MOST_ROWS = 16  # tokens of a step beside which drafts are decoded: with more the device has enough to do


class Speculation:
    """Adds drafts to what a step decodes. Only time is at stake: what texts say stays as it is.

    draft_max: tokens of a draft at most. share: of the cells, that may be in use with drafts. every: no draft
    goes beyond such a position, where a resume point is kept; 0: none is. refused: as EngineStats has it.
    """

    def __init__(self, drafter: Drafter, draft_max: int, share: float, every: int) -> None:
        self.gate = Gate()
        self._share = share
        self.refused = {"busy": 0, "slow": 0, "cells": 0}
        self._drafter = drafter
        self._draft_max = draft_max
        self._every = every
        self._looks = False  # whether drafts were looked for in this step
        self._seconds = 0.0  # for making them: the gate counts these apart

    def add(
        self, chunks: list[Chunk], room: Callable[[int, float], int], make_room: Callable[[int], bool]
    ) -> list[Chunk]:
        """The chunks, some of them with drafts; room(n, share): how many tokens they may have, beside n.

        make_room(n): whether n cells are empty now.
        """
        self._looks = False
        decoding = [chunk.sequence for chunk in chunks if chunk.decodes and chunk.sequence.n_seqs == 1]
        n_rows = sum(chunk.n_rows for chunk in chunks)
        if n_rows > MOST_ROWS:
            self.refused["busy"] += bool(decoding)
            return chunks
        due = [sequence for sequence in decoding if sequence.record.is_due()]
        self._looks = bool(due)
        if not due:
            return chunks
        self.gate.begin(len(decoding), n_rows)
        asked = [(sequence, self._most(sequence)) for sequence in due]
        begin = time.perf_counter()
        drafts = self._drafter.drafts(asked, self.gate, make_room)
        self._seconds = time.perf_counter() - begin
        self.refused["slow"] += self.gate.has_refused
        if not any(drafts):
            return chunks
        left = room(n_rows, self._share)
        self.refused["cells"] += left < sum(map(len, drafts))
        kept: dict[int, tuple[int, ...]] = {}
        for sequence, draft in zip(due, drafts, strict=True):
            kept[id(sequence)] = tuple(draft[: max(left, 0)])
            left -= len(draft)
        return [chunk._replace(draft=kept.get(id(chunk.sequence), ())) for chunk in chunks]

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """A text has said something. n_before: tokens that it had before."""
        if self._looks:
            self._drafter.learn(sequence, n_before)

    def time(self, chunks: list[Chunk], seconds: float) -> None:
        """What a step took, with the making of its drafts, without what each token takes that is said.

        That is the same with drafts and without: n / (step + n * said) is largest where n / step is.
        """
        if self._looks and all(chunk.decodes for chunk in chunks):
            n_rows = sum(chunk.n_rows + len(chunk.draft) for chunk in chunks)
            depth = sum(chunk.sequence.n_decoded for chunk in chunks)
            self.gate.seconds.learn(n_rows, seconds - self._seconds, depth)

    def close(self) -> None:
        """Frees what the drafter has."""
        self._drafter.close()

    def _most(self, sequence: RequestSequence) -> int:
        most = min(self._draft_max, sequence.n_may_say - 1)
        if sequence.window is not None:  # as many as it could say without a shift
            most = min(most, sequence.window.n_ctx - 2 - sequence.n_decoded)
        if self._every:
            most = min(most, -(sequence.n_decoded + 1) % self._every)
        return max(most, 0)

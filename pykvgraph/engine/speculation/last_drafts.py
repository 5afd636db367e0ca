"""What was drafted last for each text, to learn from what the text says then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.gate import Acceptance
from pykvgraph.engine.step_seconds import averaged


class LastDrafts:
    """The drafts of one step. each: seconds, to make a token."""

    def __init__(self) -> None:
        self.each = 0.0
        self._drafts: dict[int, tuple[int, list[int]]] = {}  # by sequence: the text's length, its last draft
        self._all = Acceptance()  # of all texts, the last ones above all

    def rate(self, sequence: RequestSequence) -> float:
        """How often a token holds that is drafted for the text; at first as often as those of other texts."""
        return sequence.record.rate(0, self._all.rate(0))

    def keep(self, drafts: Sequence[tuple[RequestSequence, list[int]]], begin: float) -> None:
        """Of texts as they are now; begin: when the first one was begun."""
        self._drafts = {sequence.seq: (len(sequence.ids), draft) for sequence, draft in drafts}
        if n := sum(len(draft) for _, draft in drafts):
            self.each = averaged(self.each, (time.perf_counter() - begin) / n)

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """The text has said something; n_before: tokens that it had before."""
        n, draft = self._drafts.pop(sequence.seq, (0, []))
        if n == n_before:
            said = sequence.ids[n : n + len(draft)]
            for record in (sequence.record, self._all):
                record.learn(0, len(said), common_length(said, draft))

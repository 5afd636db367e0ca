"""What was drafted last for each text, to learn from what the text says then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.gate import Acceptance, Gate
from pykvgraph.engine.step_seconds import Seconds


class LastDrafts:
    """The drafts of one step, and how often those of all steps have held."""

    def __init__(self) -> None:
        self._each = Seconds()  # to make a token
        self._drafts: dict[int, tuple[int, list[int]]] = {}  # by sequence: the text's length, its last draft
        self._all = Acceptance()  # of all texts, the last ones above all

    def wanted(
        self, asked: Sequence[tuple[RequestSequence, int]], gate: Gate
    ) -> list[tuple[RequestSequence, int]]:
        """The texts, with how many tokens to draft of each. asked: and the most of them.

        A token of a text whose drafts aren't known holds as often as those of other texts.
        """
        usual = self._all.rate(0)
        rates = [(sequence.record.rate(0, usual), most) for sequence, most in asked]
        lengths = gate.lengths(rates, self._each.average)
        return [(sequence, n) for (sequence, _), n in zip(asked, lengths, strict=True)]

    def keep(self, drafts: Sequence[tuple[RequestSequence, list[int]]], begin: float) -> None:
        """Of texts as they are now; begin: when the first one was begun."""
        self._drafts = {sequence.seq: (len(sequence.ids), draft) for sequence, draft in drafts}
        if n := sum(len(draft) for _, draft in drafts):
            self._each.learn((time.perf_counter() - begin) / n)

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """The text has said something; n_before: tokens that it had before."""
        n, draft = self._drafts.pop(sequence.seq, (0, []))
        if n == n_before:
            said = sequence.ids[n : n + len(draft)]
            for record in (sequence.record, self._all):
                record.learn(0, len(said), common_length(said, draft))

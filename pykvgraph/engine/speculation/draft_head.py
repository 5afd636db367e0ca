"""Drafts by the model's own draft head (MTP)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from pykvgraph.context.context import Context
from pykvgraph.context.draft_tokens import DraftedText
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.gate import Gate
from pykvgraph.engine.speculation.last_drafts import LastDrafts
from pykvgraph.errors import KVGraphError


class HeadDrafter:
    """Proposes what the model's draft head finds likeliest, token by token, for several texts at a time.

    ctx: the engine's, of a model with a draft head. A draft takes cells for as long as it is made: where
    there are none, or it fails, the texts go on without.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._last = LastDrafts()

    def drafts(
        self,
        asked: Sequence[tuple[RequestSequence, int]],
        gate: Gate,
        make_room: Callable[[int], bool],
    ) -> list[list[int]]:
        """For each text at most so many tokens that may follow it; make_room(n): for so many cells."""
        wanted = self._last.wanted(asked, gate)
        texts = [DraftedText(sequence.seq, sequence.ids[-1], n) for sequence, n in wanted]
        begin = time.perf_counter()
        n = sum(text.n for text in texts)
        found: list[list[int]] = [[] for _ in texts]
        with contextlib.suppress(KVGraphError, MemoryError):
            if n and make_room(n):
                found = self._ctx.draft(texts)
        self._last.keep([(sequence, draft) for (sequence, _), draft in zip(asked, found, strict=True)], begin)
        return found

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """The text has said something."""
        self._last.learn(sequence, n_before)

    def close(self) -> None:
        """Has nothing to free: the context is the engine's."""

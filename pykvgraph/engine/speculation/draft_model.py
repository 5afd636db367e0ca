"""Drafts by a second, smaller model of the same vocabulary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pykvgraph.context.batch import Batch
from pykvgraph.context.common_length import common_length
from pykvgraph.context.context import Context
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.gate import Gate
from pykvgraph.engine.speculation.last_drafts import LastDrafts
from pykvgraph.errors import KVGraphError
from pykvgraph.sequence.tokens import DecodedTokens


class ModelDrafter:
    """Proposes what the draft model finds likeliest, token by token, for several texts at a time.

    ctx: of the draft model, as many sequences as the engine has; each has what the engine's has. Where it
    fails, or has no room, there are no drafts: the texts go on without.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._known = [DecodedTokens() for _ in range(ctx.n_seq_max)]  # what each sequence has
        self._last = LastDrafts()
        self._batch = Batch()

    def drafts(
        self,
        asked: Sequence[tuple[RequestSequence, int]],
        gate: Gate,
        make_room: Callable[[int], bool],
    ) -> list[list[int]]:
        """For each text at most so many tokens that may follow it; the engine's cells are not needed."""
        wanted = self._last.wanted(asked, gate)
        found: list[list[int]] = [[] for _ in wanted]
        try:
            begin = self._propose(wanted, found)
        except (KVGraphError, MemoryError):
            self._ctx.reset()
            self._known = [DecodedTokens() for _ in self._known]
            return [[] for _ in wanted]
        drafts = [(sequence, draft) for (sequence, _), draft in zip(wanted, found, strict=True)]
        self._last.keep(drafts, begin)
        return found

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """The text has said something."""
        self._last.learn(sequence, n_before)

    def close(self) -> None:
        """Frees its context."""
        self._ctx.close()

    def _propose(self, wanted: Sequence[tuple[RequestSequence, int]], found: list[list[int]]) -> float:
        """Token by token, those of all texts in one batch. Returns when the first of them was begun."""
        left = {i: (sequence.seq, n) for i, (sequence, n) in enumerate(wanted) if n}
        ready = [i for i in left if self._catch_up(wanted[i][0])]
        begin = time.perf_counter()  # not of reading prompts, which every text has to pay once
        last = {i: wanted[i][0].ids[-1] for i in ready}
        while last:
            self._batch.clear()
            seqs = [left[i][0] for i in last]
            self._batch.add_each(list(last.values()), [self._known[seq].n_decoded for seq in seqs], seqs)
            self._ctx.decode(self._batch, scores=True)
            for seq, token in zip(seqs, last.values(), strict=True):
                self._known[seq].extend([token])
            for i, token in zip(last, self._ctx.scores().best.tolist(), strict=True):
                found[i].append(token)
            last = {i: found[i][-1] for i in last if len(found[i]) < left[i][1]}
        return begin

    def _catch_up(self, sequence: RequestSequence) -> bool:
        """Decodes the text, but for its last token; False: it is not yet done, or there is no room.

        As many tokens as a batch has: a long prompt takes several steps, without drafts.
        """
        seq, kv = sequence.seq, self._ctx.kv
        known, ids = self._known[seq], sequence.ids[:-1]
        n = common_length(known.ids, ids)
        if n < known.n_decoded:
            kv.seq_rm(seq, n, -1)
            known.cut(n)
        missing = ids[n : n + self._ctx.n_batch]
        if len(missing) + self._ctx.n_seq_max > kv.n_free and not self._make_room(seq, len(missing)):
            return False
        if missing:
            self._batch.clear()
            self._batch.extend(missing, n, (seq,), False)
            self._ctx.decode(self._batch)
            known.extend(missing)
        return known.n_decoded == len(ids)

    def _make_room(self, seq: int, n: int) -> bool:
        """Empties the other sequences: most of them are of texts that have ended."""
        for other, known in enumerate(self._known):
            if other != seq and known.n_decoded:
                self._ctx.kv.seq_rm(other, -1, -1)
                known.cut(0)
        return n + self._ctx.n_seq_max <= self._ctx.kv.n_free

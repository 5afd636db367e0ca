"""What follows a decode: texts say tokens, forks begin, and the index keeps what was decoded."""

from __future__ import annotations

import math
import time
from collections import Counter

from pykvgraph.context.context import LastOutput
from pykvgraph.engine.model_run import Decoded
from pykvgraph.engine.prepared_text import PreparedText
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine.scheduler import Chunk
from pykvgraph.engine.speculation.speculation import Speculation
from pykvgraph.errors import KVGraphError
from pykvgraph.sequence.sequence import EVERY

# seconds that a step waits for grammars; an ordinary one tells within 3 to 30 ms of the last token
_GRAMMAR_PATIENCE = 0.05


class Postprocess:
    """Hands out what a decode says, and ends the texts for which that was the last token.

    counts: gets drafted and accepted tokens.
    """

    def __init__(
        self, running_set: RunningSet, speculation: Speculation | None, counts: Counter[str]
    ) -> None:
        self._running_set = running_set
        self._speculation = speculation
        self._counts = counts

    def process(self, decoded: list[Decoded]) -> None:
        """Of chunks that were decoded together."""
        for chunk, _ in decoded:
            self._advance(chunk.sequence, chunk.n, to_end=chunk.ends and chunk.n > 1)
        now = time.perf_counter()
        for chunk, _ in decoded:
            chunk.sequence.report(now)
        for chunk, rows in decoded:
            if not chunk.ends:
                continue
            forks = self._fork(chunk.sequence)
            if chunk.sequence.runs:
                self._say_drafted(chunk, rows, now)
            for each in forks:
                if each.runs:
                    self._say(each, rows[:1], now)

    def say_late(self) -> None:
        """Texts say what their grammars have allowed meanwhile."""
        for sequence in [each for each in self._running_set.scheduler.running if each.unsaid is not None]:
            outputs, sequence.unsaid = sequence.unsaid, None
            if sequence.runs and outputs is not None:
                self._say(sequence, outputs, -math.inf)

    def _advance(self, sequence: RequestSequence, n: int, to_end: bool) -> None:
        """These tokens of it are in the cache: the index learns of them."""
        begin = sequence.n_decoded
        sequence.advance(n)
        if not self._running_set.shares:
            return
        self._running_set.keep(sequence, to_end=to_end)
        is_prepared = isinstance(sequence, PreparedText)  # for it, no point of others goes
        wants_points = self._running_set.needs_points and not (
            is_prepared and self._running_set.is_full_of_points
        )
        if wants_points and sequence.n_shareable == sequence.n_decoded:
            block_points = self._running_set.block_points
            if block_points.are_kept:
                block_points.add(sequence, begin, self._running_set.index)
            is_kept = sequence.is_at_place or sequence.n_decoded % EVERY == 0
            # block points are the spare ones of a prompt; with a draft behind it a text has another state
            is_spare = sequence.is_at_spare_place and not sequence.n_beyond
            if is_kept or (
                is_spare and not (block_points.are_kept and sequence.n_decoded < sequence.n_prompt)
            ):
                assert sequence.last is not None
                self._running_set.index.add_point(
                    sequence.last,
                    sequence.ids,
                    sequence.n_decoded,
                    sequence.seq,
                    is_spare=is_prepared or not is_kept,
                )
        self._running_set.pin(sequence)
        self._running_set.copy(sequence, to_end)

    def _fork(self, sequence: RequestSequence) -> list[RequestSequence]:
        """The other samples of a request whose prompt was just decoded: they see its cells."""
        if not sequence.runs:
            return []
        forks = self._running_set.scheduler.fork(sequence)
        try:
            for each in forks:
                self._running_set.kv.seq_cp(sequence.seq, each.seq, -1, -1)
                each.follow(sequence)
                if sequence.last is not None:
                    self._running_set.index.pin(sequence.last)
        except (KVGraphError, MemoryError) as error:
            self._running_set.fail(sequence, error)
        return forks

    def _say_drafted(self, chunk: Chunk, outputs: list[LastOutput], now: float) -> None:
        """Says a token by each row, up to the first that isn't the draft's; what is behind it goes.

        Every token is what the text's own sampler makes of the row behind the tokens before it: the same one
        as without drafts.
        """
        sequence, draft = chunk.sequence, chunk.draft
        n_before = len(sequence.ids)
        sequence.record.drafted += len(draft)
        self._counts["drafted"] += len(draft)
        self._counts["drafts"] += bool(draft)
        n_rows = len(outputs) - len(draft)
        self._say(sequence, outputs[:n_rows], now)
        for token, output in zip(draft, outputs[n_rows:], strict=True):
            if not sequence.runs or sequence.unsaid is not None or sequence.ids[-1] != token:
                break
            sequence.record.accepted += 1
            self._counts["accepted"] += 1
            sequence.n_decoded += 1
            sequence.n_beyond -= 1
            self._say(sequence, [output], now)
        if not sequence.runs:
            return
        if self._speculation and sequence.n_seqs == 1:
            self._speculation.learn(sequence, n_before)
        if draft and not self._running_set.cut(sequence):
            self._running_set.preempt(sequence)
        elif draft:
            self._advance(sequence, 0, to_end=False)

    def _say(self, sequence: RequestSequence, outputs: list[LastOutput], decoded: float) -> None:
        """Says a token, unless its grammar takes too long: the others don't wait for that. decoded: when."""
        patience = decoded + _GRAMMAR_PATIENCE - time.perf_counter()
        try:
            if not sequence.can_say(max(patience, 0.0)):
                sequence.unsaid = [each._replace(logits=each.logits.copy()) for each in outputs]
                return
            now = time.perf_counter()
            reason = sequence.say(outputs, now)
        except (KVGraphError, MemoryError) as error:
            self._running_set.fail(sequence, error)
            return
        if reason is not None:
            self._running_set.end(sequence)
            sequence.end(reason, now)

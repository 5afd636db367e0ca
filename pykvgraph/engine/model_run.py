"""One batch of many texts: the tokens that a step chose are decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, TypeAlias

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.engine.prepared_text import PreparedText
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine.scheduler import Chunk
from pykvgraph.errors import CacheFullError, KVGraphError

Decoded: TypeAlias = "tuple[Chunk, list[LastOutput]]"


class ModelRun:
    """Decodes chunks together. counts: gets the number of tokens as "decoded", and as "prepared"."""

    def __init__(self, ctx: Context, running_set: RunningSet, counts: Counter[str]) -> None:
        self._ctx = ctx
        self._running_set = running_set
        self._counts = counts
        self._keeps_states = any(group.kind == "state" for group in ctx.kv.groups)
        self._batch = Batch()

    def run(self, chunks: list[Chunk]) -> Iterator[list[Decoded]]:
        """The chunks with their outputs, all of them at once; the outputs are valid until the next ones.

        When the decode fails, the chunks come without their drafts, then each half by itself. Only a request
        that fails alone ends with the error.
        """
        # a sample that failed has taken the others of its request along
        chunks = [chunk for chunk in chunks if chunk.sequence.runs]
        if not chunks:
            return
        try:
            outputs = self._running_set.index.with_points_room(
                lambda: self._decode(chunks),
                sum(chunk.n for chunk in chunks),
                # others go when the drafts have gone; for a text that nobody waits for, none does
                only_spare=any(chunk.draft or _is_prepared(chunk) for chunk in chunks),
            )
        except (KVGraphError, MemoryError) as error:
            if any(chunk.draft for chunk in chunks):
                yield from self.run([chunk._replace(draft=()) for chunk in chunks])
            elif len(chunks) > 1:
                half = len(chunks) // 2
                yield from self.run(chunks[:half])
                yield from self.run(chunks[half:])
            elif isinstance(error, CacheFullError) and self._running_set.give_up_old(chunks[0].sequence):
                yield from self.run(chunks)
            else:
                self._running_set.fail(chunks[0].sequence, error)
                self._running_set.start_over_if_broken()
            return
        yield list(zip(chunks, outputs, strict=True))

    def _decode(self, chunks: list[Chunk]) -> list[list[LastOutput]]:
        """The outputs of each chunk: of its last token if it ends, and of its draft's; else none."""
        batch = self._batch
        batch.clear()
        n_single = next((i for i, chunk in enumerate(chunks) if not chunk.is_single), len(chunks))
        if n_single:  # most steps are of nothing else
            tips = [tip for chunk in chunks[:n_single] for tip in chunk.sequence.tips]
            batch.add_each(*zip(*tips, strict=True))
        for chunk in chunks[n_single:]:
            self._add(chunk)
        self._ctx.set_adapters(chunks[0].sequence.adapters)
        rows = iter(self._ctx.decode_rows(batch, repair=any(chunk.sequence.anew for chunk in chunks)))
        self._counts["decoded"] += len(batch)
        self._counts["prepared"] += sum(chunk.n for chunk in chunks if _is_prepared(chunk))
        for chunk in chunks:
            chunk.sequence.n_beyond = len(chunk.draft)
        return [[next(rows) for _ in range(chunk.n_outputs)] for chunk in chunks]

    def _add(self, chunk: Chunk) -> None:
        """More than a token of an answer."""
        sequence, n, ends, draft = chunk
        if draft:
            begin, n_drafted = sequence.n_decoded, len(draft)
            ids = sequence.ids[begin : begin + n]
            # of a window everything stays that the last token saw; states are kept behind each token
            behind = range(begin + 1, begin + 1 + n_drafted) if self._keeps_states else ()
            self._batch.extend([*ids, *draft], begin, (sequence.seq,), "all", behind)
        else:
            runs = sequence.next_tokens(n)
            for run in runs:
                output: Literal["last", False] = "last" if ends and run == runs[-1] else False
                self._batch.extend(sequence.ids[slice(*run)], run[0], (sequence.seq,), output)


def _is_prepared(chunk: Chunk) -> bool:
    return isinstance(chunk.sequence, PreparedText)

"""The engine's step: schedule, run, postprocess."""

from __future__ import annotations

import time
from collections import Counter

from pykvgraph.context.context import Context
from pykvgraph.engine.admission import Admission
from pykvgraph.engine.commands import CommandQueue
from pykvgraph.engine.compressed import CompressedPrefixes
from pykvgraph.engine.compressed_records import CompressedRecords
from pykvgraph.engine.context_shifts import shift_full
from pykvgraph.engine.entry import Entry
from pykvgraph.engine.fetches import Fetches
from pykvgraph.engine.model_run import ModelRun
from pykvgraph.engine.postprocess import Postprocess
from pykvgraph.engine.preparations import Preparations
from pykvgraph.engine.prepared_text import PreparedText
from pykvgraph.engine.readings import Readings
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine.scheduler import Chunk
from pykvgraph.engine.speculation.speculation import Speculation
from pykvgraph.engine.token_budget import TokenBudget
from pykvgraph.engine.types import EngineLook, EngineStats
from pykvgraph.errors import CacheFullError, InvalidArgumentError
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.tiers.options import Tiers
from pykvgraph.tiers.rows import Saver
from pykvgraph.tiers.store import Store

_ENOUGH_ON_CPU = 36  # tokens of prompts; in larger steps each takes as long (docs/many-requests.md)
_LEAST_ON_CPU = 16  # however long such a step lasts
_SPACING_ON_CPU = 64  # tokens from one point where a text may go on to the next: two blocks
_GRAMMAR_IDLE = 0.005  # between two looks, when there is nothing else to do


class Stepper:
    """Decodes many texts on one context, a batch a step. Not for several threads at once.

    A step is: schedule (who enters, which tokens come next), run (one batch), postprocess (what is said).

    overcommit: a text enters when its prompt fits; without, when all that it may become fits. speculation:
    None: there are no drafts. reuse: see Edits. tiers: where prefixes go whose cells are needed; None:
    nowhere. n_pinned: cells that may be pinned for a time. compress: the share that compressed prefixes keep;
    None: there are none.
    """

    def __init__(
        self,
        ctx: Context,
        *,
        n_points: int,
        shares: bool,
        overcommit: bool,
        max_itl: float | None,
        speculation: Speculation | None,
        reuse: int,
        tiers: Tiers | None,
        n_pinned: int,
        compress: float | None = None,
    ) -> None:
        self._ctx = ctx
        self._fetches = self.saver = saver = None
        if tiers is not None:
            store = Store(tiers)
            try:
                self.saver = saver = Saver(ctx, store, n_points > 0)
                self._fetches = Fetches(ctx, store, saver)
            except BaseException:
                store.close()
                raise
        self._running_set = running_set = RunningSet(ctx, n_points, shares, saver, n_pinned)
        self._scheduler = running_set.scheduler
        on_cpu = ctx.model.device == "CPU"
        on_device = max(ctx.n_batch // 4, 1)
        n_beside, n_least = (_ENOUGH_ON_CPU, _LEAST_ON_CPU) if on_cpu else (on_device, on_device)
        self._budget = TokenBudget(max_itl, n_beside, n_least)
        least = self._budget.least(ctx.n_batch)
        self._admission = Admission(
            ctx, running_set.needs_points, overcommit, least, lambda: running_set.index.n_pinned_alone
        )
        self._readings = Readings(ctx, running_set, self._admission)
        self._has_read = False  # whether a part of a reading was decoded in the step before, or in this one
        self._counts = counts = Counter[str]()
        self._compressed = None
        if compress is not None:
            records = (
                CompressedRecords(ctx, saver, self._fetches, compress) if saver and self._fetches else None
            )
            self._compressed = CompressedPrefixes(ctx, running_set, compress, records)
        self._entry = Entry(
            running_set,
            self._admission,
            self._readings,
            self._fetches,
            # devices lose too much in small chunks
            spacing=_SPACING_ON_CPU if on_cpu and not running_set.block_points.are_kept else 0,
            reuse=reuse,
            counts=counts,
            compressed=self._compressed,
        )
        self._preparations = Preparations(running_set, self._entry)
        self._model_run = ModelRun(ctx, running_set, counts)
        self._postprocess = Postprocess(running_set, speculation, counts)
        self._speculation = speculation
        self._is_broken = False
        self.commands = CommandQueue()

    @property
    def shares(self) -> bool:
        """Whether the index keeps anything."""
        return self._running_set.shares

    @property
    def _index(self) -> PrefixIndex:
        return self._running_set.index

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, not even what idle time is for."""
        is_done = self.commands.is_empty and self._nobody_waits and self._preparations.is_empty
        return is_done and not (self._compressed and self._compressed.has_work)

    @property
    def _nobody_waits(self) -> bool:
        """Whether nothing runs, and nothing is to run, but what is prepared."""
        runs = self._scheduler.running and not self._preparations.is_running
        return self._readings.is_empty and not (runs or self._scheduler.waiting)

    @property
    def _is_asked(self) -> bool:
        """Whether somebody wants more than to look."""
        return not self._nobody_waits or self.commands.has_work

    def stats(self) -> EngineStats:
        """Counts since the beginning, and how it is now."""
        kv, scheduler, count = self._ctx.kv, self._scheduler, self._counts
        return EngineStats(
            steps=count["steps"],
            n_running=len(self._asked),
            n_waiting=len(scheduler.waiting) + self.commands.n_sequences,
            n_parked=len(self._running_set.parked),
            n_preempted=self._running_set.n_preempted,
            prompt_tokens=count["prompt_tokens"],
            prefix_hit_tokens=count["prefix_hit_tokens"],
            edited_tokens=count["edited_tokens"],
            decoded_again=count["decoded_again"],
            decoded_tokens=count["decoded"],
            cells_used=tuple(group.n_used for group in kv.groups),
            n_blocks=self._index.n_nodes,
            n_resume_points=self._index.n_points,
            drafted=count["drafted"],
            accepted=count["accepted"],
            tiers=self._fetches.stats() if self._fetches else None,
            drafts_refused=dict(self._speculation.refused) if self._speculation else {},
            drafts=count["drafts"],
            stepped_texts=count["stepped_texts"],
            n_pinned=self._index.n_pinned,
            prepared_tokens=count["prepared"],
            n_compressed=self._compressed.n_kept if self._compressed else 0,
            n_to_compress=self._compressed.n_left if self._compressed else 0,
        )

    def look(self) -> EngineLook:
        """The cells and the texts as they are now."""
        kv, scheduler, now = self._ctx.kv, self._scheduler, time.perf_counter()
        groups = kv.groups
        return EngineLook(
            seconds=now,
            stats=self.stats(),
            running=tuple(each.look(now) for each in self._asked),
            waiting=tuple(each.look(now) for each in scheduler.waiting.first()),
            groups=groups,
            views=tuple(kv.cells(index) for index in range(len(groups))),
        )

    def step(self) -> None:
        """Takes what is new, chooses the next tokens, decodes them, and hands out what was said.

        Where nobody has asked for anything, a part of what idle time is for is done.
        """
        self._make_way()
        self.commands.run(self._running_set, self._readings)
        self._make_way()  # for who came in between
        self._read_part()
        begin = time.perf_counter()
        self._postprocess.say_late()
        self._entry.take_fetched()
        self._entry.admit()
        if not self._is_asked:
            self._preparations.begin()
        shift_full(self._running_set)
        self.commands.show(self.look)
        chunks = self._schedule()
        if not chunks:
            if self._compressed and self._compressed.has_work and not self._is_asked:
                self._compressed.read_part()
            else:
                self._wait()
            return
        saying = 0.0
        for decoded in self._model_run.run(chunks):
            since = time.perf_counter()
            self._postprocess.process(decoded)
            saying += time.perf_counter() - since
        self._learn(chunks, time.perf_counter() - begin, saying)

    def _make_way(self) -> None:
        """What is done in idle time stops where somebody has asked; next turns come before prefixes."""
        if self._is_asked:
            self._preparations.make_way()
        if self._compressed and (self._is_asked or not self._preparations.is_empty):
            self._compressed.give_way()

    def end_all(self, error: BaseException | None) -> None:
        """Every request ends: cancelled, or with the error. The cache stays as it is: no step may follow."""
        self._is_broken = self._is_broken or error is not None
        why = error or InvalidArgumentError("the engine was closed meanwhile")
        self._readings.end(why)
        left = [
            *self.commands.end(why),
            *self._scheduler.running,
            *self._scheduler.waiting,
            *self._running_set.parked,
        ]
        for queue in (self._scheduler.running, self._scheduler.waiting, self._running_set.parked):
            queue.clear()
        for sequence in left:
            if error is None:
                sequence.cancel(time.perf_counter())
            else:
                sequence.request._fail(error)

    def close(self) -> None:
        """Frees the context, and the draft model's; what the index has goes to the disk first."""
        if self._fetches:
            self._fetches.close(None if self._is_broken else self._running_set)
        self.abandon()

    def abandon(self) -> None:
        """As close(), in a child process: the threads of tiers are not there."""
        self._ctx.close()
        if self._speculation:
            self._speculation.close()

    def _read_part(self) -> None:
        """Of a reading; in turns with prompts: with a part of each, a step would last twice as long."""
        running = self._scheduler.running
        is_prompts_turn = self._has_read and not all(each.decodes for each in running)
        n_tokens = self._budget.n_prompt_tokens(len(running), self._ctx.n_batch)
        if running:  # their tokens take a decode of their own in this step
            n_tokens = min(n_tokens, self._budget.n_least)
        self._has_read = not is_prompts_turn and self._readings.read_part(n_tokens)

    def _schedule(self) -> list[Chunk]:
        """What is decoded now, of those that have entered, with drafts."""
        chunks = self._chosen()
        if not chunks:
            return []
        self._scheduler.count_idle(chunks)
        return self._with_drafts(chunks)

    def _chosen(self) -> list[Chunk]:
        """Chunks for which there are cells; the youngest texts are preempted until there are enough."""
        if self._preparations.is_running:
            return self._prepared()
        while True:
            n_decoding = sum(each.decodes for each in self._scheduler.running)
            n_tokens = self._budget.n_prompt_tokens(n_decoding, self._ctx.n_batch)
            chunks = self._scheduler.chunks(0 if self._has_read and n_decoding else n_tokens)
            if not chunks or self._index.make_room(sum(chunk.n_rows for chunk in chunks)):
                return chunks
            youngest = self._scheduler.youngest()
            if len(self._scheduler.running) > 1 or self._readings.has_begun:
                self._running_set.preempt(youngest)
            elif not self._index.give_up_pin():
                self._running_set.fail(
                    youngest, CacheFullError("the cache has too few cells for this request")
                )

    def _prepared(self) -> list[Chunk]:
        """The next part of a text that nobody waits for yet: no more than whoever comes waits for."""
        n_tokens = self._budget.n_prompt_tokens(1, self._ctx.n_ubatch)
        chunks = self._scheduler.chunks(n_tokens)
        return chunks if self._preparations.has_room(sum(chunk.n for chunk in chunks)) else []

    @property
    def _asked(self) -> list[RequestSequence]:
        """The texts that run, of requests."""
        return [each for each in self._scheduler.running if not isinstance(each, PreparedText)]

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """In the order in which a batch has them: those of a single token come first."""
        if self._speculation is None:
            return chunks
        drafted = self._speculation.add(chunks, self._room_for_drafts, self._index.make_room)
        if drafted is chunks:
            return chunks
        n_tokens = sum(chunk.n_rows + len(chunk.draft) for chunk in drafted)
        if self._index.make_room(n_tokens):
            return sorted(drafted, key=lambda chunk: not chunk.is_single)
        self._speculation.refused["cells"] += 1
        return chunks

    def _room_for_drafts(self, n_tokens: int, share: float) -> int:
        room = self._admission.room_for_drafts(self._scheduler.running, n_tokens, share)
        return min(room, self._ctx.n_ubatch - n_tokens)

    def _wait(self) -> None:
        """There is nothing to decode until a grammar has told, or rows have come from a tier."""
        if any(sequence.unsaid is not None for sequence in self._scheduler.running):
            time.sleep(_GRAMMAR_IDLE)
        elif self._fetches and self._fetches.any and not self._readings.has_begun:
            self._fetches.wait()

    def _learn(self, chunks: list[Chunk], seconds: float, saying: float) -> None:
        """What the step took, and what of that choosing and handing out its tokens did."""
        n_decoding = sum(chunk.decodes for chunk in chunks)
        n_of_prompts = sum(chunk.n for chunk in chunks) - n_decoding
        self._budget.learn(n_decoding, n_of_prompts, seconds)
        if self._speculation:
            self._speculation.time(chunks, seconds - saying)
        self._counts["steps"] += 1
        self._counts["stepped_texts"] += len(chunks)

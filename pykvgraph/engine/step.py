"""The engine's step: who enters, what is decoded, what is said, what the index keeps of it."""

from __future__ import annotations

import math
import time

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.engine.admission import Admission
from pykvgraph.engine.beginnings import is_coming, mark_partings
from pykvgraph.engine.commands import CommandQueue
from pykvgraph.engine.context_shifts import shift_full
from pykvgraph.engine.fetches import Fetches
from pykvgraph.engine.moved_parts import attach_moved
from pykvgraph.engine.readings import Readings
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine.scheduler import Chunk
from pykvgraph.engine.speculation.speculation import Speculation
from pykvgraph.engine.token_budget import TokenBudget
from pykvgraph.engine.types import EngineLook, EngineStats
from pykvgraph.errors import CacheFullError, InvalidArgumentError, KVGraphError
from pykvgraph.prefix.index import Found, PrefixIndex
from pykvgraph.sequence.sequence import EVERY
from pykvgraph.tiers.options import Tiers
from pykvgraph.tiers.rows import Saver
from pykvgraph.tiers.store import Store

_ENOUGH_ON_CPU = 64  # tokens of prompts; in steps of 512 each takes as long (docs/many-requests.md)
_LEAST_ON_CPU = 16  # in steps of so many each takes a quarter longer
# seconds that a step waits for grammars; an ordinary one tells within 3 to 30 ms of the last token
_GRAMMAR_PATIENCE = 0.05
_GRAMMAR_IDLE = 0.005  # between two looks, when there is nothing else to do
_PROMPTS = "prompt_tokens", "prefix_hit_tokens", "decoded_again"
_COUNTED = (*_PROMPTS, "steps", "decoded", "drafted", "accepted")


class Stepper:
    """Decodes many texts on one context, a batch a step. Not for several threads at once.

    overcommit: a text enters when its prompt fits; without, when all that it may become fits. speculation:
    None: there are no drafts. reuse: parts of at least so many tokens are
    moved; 0: none are. tiers: where prefixes go whose cells are needed; None: nowhere.
    """

    def __init__(
        self,
        ctx: Context,
        n_points: int,
        shares: bool,
        overcommit: bool,
        max_itl: float | None,
        speculation: Speculation | None,
        reuse: int,
        tiers: Tiers | None,
    ) -> None:
        self._ctx = ctx
        self._reuse = reuse
        self._fetches = self.saver = saver = None
        if tiers is not None:
            store = Store(tiers)
            try:
                self.saver = saver = Saver(ctx, store, n_points > 0)
                self._fetches = Fetches(ctx, store, saver)
            except BaseException:
                store.close()
                raise
        self._running_set = running_set = RunningSet(ctx, n_points, shares, saver)
        self._shares = shares
        self._needs_points, self._scheduler = running_set.needs_points, running_set.scheduler
        on_cpu = ctx.model.device == "CPU"
        on_device = max(ctx.n_batch // 4, 1)
        n_beside, n_least = (_ENOUGH_ON_CPU, _LEAST_ON_CPU) if on_cpu else (on_device, on_device)
        self._budget = TokenBudget(max_itl, n_beside, n_least)
        least = self._budget.least(ctx.n_batch)
        self._admission = Admission(ctx, running_set.needs_points, overcommit, least)
        self._readings = Readings(ctx, running_set, self._admission)
        self._has_read = False  # whether a part of a reading was decoded in the step before, or in this one
        # from one spare resume point of a prompt to the next; 0: devices lose too much in small chunks
        self._spacing = _ENOUGH_ON_CPU if on_cpu else 0
        self._speculation = speculation
        self._keeps_states = any(group.kind == "state" for group in ctx.kv.groups)
        self._batch = Batch()
        self._is_broken = False
        self.commands = CommandQueue()
        self._counts = dict.fromkeys(_COUNTED, 0)

    @property
    def _index(self) -> PrefixIndex:
        return self._running_set.index

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        is_done = self.commands.is_empty and self._readings.is_empty
        return is_done and not (self._scheduler.running or self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """Counts since the beginning, and how it is now."""
        kv, scheduler, count = self._ctx.kv, self._scheduler, self._counts
        return EngineStats(
            steps=count["steps"],
            n_running=len(scheduler.running),
            n_waiting=len(scheduler.waiting) + self.commands.n_sequences,
            n_parked=len(self._running_set.parked),
            n_preempted=self._running_set.n_preempted,
            prompt_tokens=count["prompt_tokens"],
            prefix_hit_tokens=count["prefix_hit_tokens"],
            decoded_again=count["decoded_again"],
            decoded_tokens=count["decoded"],
            cells_used=tuple(group.n_used for group in kv.groups),
            n_blocks=self._index.n_nodes,
            n_resume_points=self._index.n_points,
            drafted=count["drafted"],
            accepted=count["accepted"],
            tiers=self._fetches.stats() if self._fetches else None,
            drafts_refused=dict(self._speculation.refused) if self._speculation else {},
        )

    def look(self) -> EngineLook:
        """The cells and the texts as they are now."""
        kv, scheduler, now = self._ctx.kv, self._scheduler, time.perf_counter()
        groups = kv.groups
        return EngineLook(
            seconds=now,
            stats=self.stats(),
            running=tuple(each.look(now) for each in scheduler.running),
            waiting=tuple(each.look(now) for each in scheduler.waiting.first()),
            groups=groups,
            views=tuple(kv.cells(index) for index in range(len(groups))),
        )

    def step(self) -> None:
        """Takes what is new, lets waiting texts enter, decodes one batch, and hands out what was said."""
        self.commands.run(self._running_set, self._readings)
        self._read_part()
        begin = time.perf_counter()
        self._take_fetched()
        self._say_late()
        self._admit()
        shift_full(self._running_set)
        self.commands.show(self.look)
        if not (chunks := self._chosen()):
            if any(sequence.unsaid is not None for sequence in self._scheduler.running):
                time.sleep(_GRAMMAR_IDLE)
            elif self._fetches and self._fetches.any and not self._readings.has_begun:
                self._fetches.wait()
            return
        self._scheduler.count_idle(chunks)
        chunks = self._with_drafts(chunks)
        self._run(chunks)
        n_decoding = sum(chunk.decodes for chunk in chunks)
        n_tokens = sum(chunk.n for chunk in chunks)
        seconds = time.perf_counter() - begin
        self._budget.learn(n_decoding, n_tokens - n_decoding, seconds)
        if self._speculation:
            self._speculation.time(chunks, seconds)
        self._counts["steps"] += 1

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

    # ---- who enters

    def _admit(self) -> None:
        """Waiting texts enter, in their order, while there are sequences and cells for them."""
        if self._readings.waits_for_cells:
            return
        first = self._scheduler.waiting.first()
        if self._needs_points and self._shares:
            mark_partings(first, self._scheduler.running)
        for sequence in first:
            if sequence.request.done:  # its rows were lost while others entered
                continue
            if sequence.n_seqs > self._scheduler.n_free_seqs:
                return
            if sequence.own is not None:
                fits = self._admission.fits(self._scheduler.running, sequence, 0)
                if not (fits and self._running_set.put_back(sequence, sequence.own)):
                    return
                continue
            found = self._find(sequence)
            if self._shares and is_coming(sequence, found.n, self._scheduler.running, self._needs_points):
                continue
            if self._enter(sequence, found):
                continue
            if self._scheduler.running or self._readings.has_begun:
                return
            self._index.clear()  # it fits an empty cache: submit() has seen to that
            self._enter(sequence, self._find(sequence))

    def _find(self, sequence: RequestSequence) -> Found:
        """What the cache has of it; but for the last token, which is decoded for its output."""
        ids = sequence.ids if self._shares else sequence.ids[:0]
        return self._index.find(ids, len(sequence.ids) - 1, sequence.salt)

    def _enter(self, sequence: RequestSequence, found: Found) -> bool:
        """It runs, if its cells will be there."""
        running = self._scheduler.running
        if not self._admission.fits(running, sequence, found.n):
            return False
        plan = self._fetches.plan(sequence.ids, sequence.salt, found) if self._fetches else None
        known = min(found.match.n, len(sequence.ids) - 1)
        self._scheduler.enter(sequence)
        found = self._attached(sequence, plan.found if plan else found, moves=plan is None)
        if not self._admission.fits(running, sequence, found.n):
            self._running_set.release(sequence)
            self._scheduler.leave(sequence)
            self._scheduler.wait(sequence)
            return False
        if self._fetches and plan:
            if found.n == plan.found.n and self._fetches.start(sequence, plan, self._running_set):
                return True
            found = self._attached_again(sequence)
        self._begin(sequence, found.n, known)
        return True

    def _begin(self, sequence: RequestSequence, n: int, known: int) -> None:
        """It has n tokens of its text, of which the cache knew more, perhaps, and decodes the rest."""
        if sequence.n_cached < 0:
            sequence.enter(n, max(known - n, 0))
            self._counts["prompt_tokens"] += sequence.n_prompt
            self._counts["prefix_hit_tokens"] += sequence.n_cached
            self._counts["decoded_again"] += sequence.n_again
        if self._needs_points and self._shares:
            for place in (*range(EVERY, len(sequence.ids), EVERY), len(sequence.ids) - 1, known):
                sequence.add_place(place)
            sequence.spacing = self._spacing

    def _take_fetched(self) -> None:
        """Texts go on behind what has come from outside the cells; else with what the cells have."""
        if self._fetches is None:
            return
        for sequence, fetch in self._fetches.finished():
            if self._fetches.show(sequence, fetch, self._running_set):
                sequence.begin(fetch.plan.n)
                self._begin(sequence, fetch.plan.n, fetch.plan.known)
            else:
                found = self._attached_again(sequence)
                self._begin(sequence, found.n, min(found.match.n, len(sequence.ids) - 1))

    def _attached_again(self, sequence: RequestSequence) -> Found:
        """Its sequence has what the cells have of it, and nothing else."""
        self._running_set.release(sequence)
        return self._attached(sequence, self._find(sequence), moves=True)

    def _attached(self, sequence: RequestSequence, found: Found, *, moves: bool) -> Found:
        """Its sequence has the most that can be had of it; returns what that is."""
        moves = moves and self._reuse > 0
        if moves and (n := attach_moved(self._running_set, sequence, found, self._reuse)):
            sequence.begin(n)
            return Found(found.match, n, None)
        if moves:
            found = self._find(sequence)  # room that was made for parts may have been of it
        try:
            sequence.last = self._index.attach(found, sequence.seq)
        except (KVGraphError, MemoryError):  # what can't be shared is decoded
            found = Found(found.match, 0, None)
            sequence.last = self._index.attach(found, sequence.seq)
        sequence.begin(found.n)
        return found

    # ---- what a step decodes

    def _read_part(self) -> None:
        """Of a reading; in turns with prompts: with a part of each, a step would last twice as long."""
        running = self._scheduler.running
        is_prompts_turn = self._has_read and not all(each.decodes for each in running)
        n_tokens = self._budget.n_prompt_tokens(len(running), self._ctx.n_batch)
        if running:  # their tokens take a decode of their own in this step
            n_tokens = min(n_tokens, self._budget.n_least)
        self._has_read = not is_prompts_turn and self._readings.read_part(n_tokens)

    def _chosen(self) -> list[Chunk]:
        """Chunks for which there are cells; the youngest texts are preempted until there are enough."""
        while True:
            n_decoding = sum(each.decodes for each in self._scheduler.running)
            n_tokens = self._budget.n_prompt_tokens(n_decoding, self._ctx.n_batch)
            chunks = self._scheduler.chunks(0 if self._has_read and n_decoding else n_tokens)
            if not chunks or self._index.make_room(sum(chunk.n for chunk in chunks)):
                return chunks
            youngest = self._scheduler.youngest()
            if len(self._scheduler.running) > 1 or self._readings.has_begun:
                self._running_set.preempt(youngest)
            else:
                self._running_set.fail(
                    youngest, CacheFullError("the cache has too few cells for this request")
                )

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        if self._speculation is None:
            return chunks
        drafted = self._speculation.add(chunks, self._room_for_drafts)
        if drafted is chunks:
            return chunks
        n_tokens = sum(chunk.n + len(chunk.draft) for chunk in drafted)
        if self._index.make_room(n_tokens):
            return drafted
        self._speculation.refused["cells"] += 1
        return chunks

    def _room_for_drafts(self, n_tokens: int, share: float) -> int:
        room = self._admission.room_for_drafts(self._scheduler.running, n_tokens, share)
        return min(room, self._ctx.n_ubatch - n_tokens)

    def _run(self, chunks: list[Chunk]) -> None:
        """Decodes the chunks together; when that fails, without drafts, then each half.

        Only who fails alone gets the error.
        """
        # a sample that failed has taken the others of its request along
        chunks = [chunk for chunk in chunks if chunk.sequence.runs]
        if not chunks:
            return
        try:
            outputs = self._decode(chunks)
        except (KVGraphError, MemoryError) as error:
            if any(chunk.draft for chunk in chunks):
                self._run([chunk._replace(draft=()) for chunk in chunks])
            elif isinstance(error, CacheFullError) and self._index.drop_point():
                self._run(chunks)  # resume points keep cells of windows
            elif len(chunks) > 1:
                half = len(chunks) // 2
                self._run(chunks[:half])
                self._run(chunks[half:])
            else:
                self._running_set.fail(chunks[0].sequence, error)
                self._running_set.start_over_if_broken()
            return
        for chunk in chunks:
            self._advance(chunk.sequence, chunk.n, to_end=chunk.ends and chunk.n > 1)
        ending = [chunk for chunk in chunks if chunk.ends]
        now = time.perf_counter()
        for chunk, rows in zip(ending, outputs, strict=True):
            forks = self._fork(chunk.sequence)
            if chunk.sequence.runs:
                self._say_drafted(chunk, rows, now)
            for each in forks:
                if each.runs:
                    self._say(each, rows[0], now)

    def _decode(self, chunks: list[Chunk]) -> list[list[LastOutput]]:
        """One batch: the outputs of the chunks that end; those of a draft too."""
        batch, ctx = self._batch, self._ctx
        batch.clear()
        decoding = [chunk.sequence for chunk in chunks if chunk.decodes and not chunk.draft]
        if decoding:
            batch.add_each(
                [each.ids[-1] for each in decoding],
                [each.n_decoded for each in decoding],
                [each.seq for each in decoding],
            )
        for sequence, n, ends, draft in (chunk for chunk in chunks if not chunk.decodes or chunk.draft):
            begin, n_drafted = sequence.n_decoded, len(draft)
            last = sequence.ids[begin : begin + n]
            if draft:
                # of a window everything stays that the last token saw; states are kept behind each token
                behind = range(begin + 1, begin + 1 + n_drafted) if self._keeps_states else ()
                batch.extend([*last, *draft], begin, (sequence.seq,), "all", behind)
            else:
                batch.extend(last, begin, (sequence.seq,), "last" if ends else False)
        others = [chunk for chunk in chunks if chunk.ends and (not chunk.decodes or chunk.draft)]
        in_batch = [*((each, 1) for each in decoding), *((c.sequence, 1 + len(c.draft)) for c in others)]
        ctx.set_adapters(chunks[0].sequence.adapters)
        rows = iter(ctx.decode_rows(batch))
        self._counts["decoded"] += len(batch)
        for chunk in chunks:
            chunk.sequence.n_beyond = len(chunk.draft)
        outputs = {id(sequence): [next(rows) for _ in range(n)] for sequence, n in in_batch}
        return [outputs[id(chunk.sequence)] for chunk in chunks if chunk.ends]

    def _advance(self, sequence: RequestSequence, n: int, to_end: bool) -> None:
        """These tokens of it are in the cache: the index learns of them."""
        sequence.n_decoded += n
        if not self._shares:
            return
        self._running_set.keep(sequence, to_end=to_end)
        if self._needs_points:
            is_kept = sequence.is_at_place or sequence.n_decoded % EVERY == 0
            if is_kept or sequence.is_at_spare_place:
                assert sequence.last is not None
                self._index.add_point(
                    sequence.last, sequence.ids, sequence.n_decoded, sequence.seq, is_spare=not is_kept
                )
        self._running_set.copy(sequence, to_end)

    def _fork(self, sequence: RequestSequence) -> list[RequestSequence]:
        """The other samples of a request whose prompt was just decoded: they see its cells."""
        if not sequence.runs:
            return []
        forks = self._scheduler.fork(sequence)
        try:
            for each in forks:
                self._ctx.kv.seq_cp(sequence.seq, each.seq, -1, -1)
                each.follow(sequence)
                if sequence.last is not None:
                    self._index.pin(sequence.last)
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
        self._say(sequence, outputs[0], now)
        for token, output in zip(draft, outputs[1:], strict=True):
            if not sequence.runs or sequence.unsaid is not None or sequence.ids[-1] != token:
                break
            sequence.record.accepted += 1
            self._counts["accepted"] += 1
            sequence.n_decoded += 1
            sequence.n_beyond -= 1
            self._say(sequence, output, now)
        if not sequence.runs:
            return
        if self._speculation:
            self._speculation.learn(sequence, n_before)
        if draft and not self._running_set.cut(sequence):
            self._running_set.preempt(sequence)
        elif draft:
            self._advance(sequence, 0, to_end=False)

    def _say_late(self) -> None:
        """Texts say what their grammars have allowed meanwhile."""
        for sequence in [each for each in self._scheduler.running if each.unsaid is not None]:
            output, sequence.unsaid = sequence.unsaid, None
            if sequence.runs and output is not None:
                self._say(sequence, output, -math.inf)

    def _say(self, sequence: RequestSequence, output: LastOutput, decoded: float) -> None:
        """Says a token, unless its grammar takes too long: the others don't wait for that. decoded: when."""
        patience = decoded + _GRAMMAR_PATIENCE - time.perf_counter()
        try:
            if not sequence.can_say(max(patience, 0.0)):
                sequence.unsaid = output._replace(logits=output.logits.copy())
                return
            now = time.perf_counter()
            reason = sequence.say(output, now)
        except (KVGraphError, MemoryError) as error:
            self._running_set.fail(sequence, error)
            return
        if reason is not None:
            self._running_set.leave(sequence)
            sequence.end(reason, now)

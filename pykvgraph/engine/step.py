"""The engine's step: who enters, what is decoded, what is said, what the index keeps of it."""

from __future__ import annotations

import math
import time

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.engine.admission import Admission
from pykvgraph.engine.beginnings import is_coming, mark_partings
from pykvgraph.engine.commands import Mail, Parking
from pykvgraph.engine.fetches import Fetches
from pykvgraph.engine.moved_parts import attach_moved
from pykvgraph.engine.pace import Pace
from pykvgraph.engine.reading import Reading
from pykvgraph.engine.readings import Readings
from pykvgraph.engine.running import Texts
from pykvgraph.engine.scheduler import Chunk
from pykvgraph.engine.sequence import Branch
from pykvgraph.engine.shifts import shift_full
from pykvgraph.engine.speculation.drafters import Drafter
from pykvgraph.engine.speculation.speculation import Speculation
from pykvgraph.engine_types import EngineLook, EngineStats
from pykvgraph.errors import CacheFullError, InvalidArgumentError, KVGraphError
from pykvgraph.prefix.index import Found, PrefixIndex
from pykvgraph.sequence.sequence import EVERY
from pykvgraph.tiers.rows import Saver
from pykvgraph.tiers.store import Store
from pykvgraph.tiers.tiers import Tiers

_ENOUGH_ON_CPU = 64  # tokens of prompts; in steps of 512 each takes as long (docs/many-requests.md)
_LEAST_ON_CPU = 16  # in steps of so many each takes a quarter longer
# seconds that a step waits for grammars; an ordinary one tells within 3 to 30 ms of the last token
_GRAMMAR_PATIENCE = 0.05
_GRAMMAR_IDLE = 0.005  # between two looks, when there is nothing else to do
_PROMPTS = "prompt_tokens", "prefix_hit_tokens", "decoded_again"
_COUNTED = (*_PROMPTS, "steps", "decoded", "drafted", "accepted")


class Stepper:
    """Decodes many texts on one context, a batch a step. Not for several threads at once.

    overcommit: a text enters when its prompt fits; without, when all that it may become fits. drafter: None:
    there are no drafts. draft_max: their tokens at most. reuse: parts of at least so many tokens are
    moved; 0: none are. tiers: where prefixes go whose cells are needed; None: nowhere.
    """

    def __init__(
        self,
        ctx: Context,
        n_points: int,
        shares: bool,
        overcommit: bool,
        max_itl: float | None,
        drafter: Drafter | None,
        draft_max: int,
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
        self._texts = texts = Texts(ctx, n_points, shares, saver)
        self._shares, self._needs_points, self._scheduler = shares, texts.needs_points, texts.scheduler
        on_cpu = ctx.model.device == "CPU"
        on_device = max(ctx.n_batch // 4, 1)
        n_beside, n_least = (_ENOUGH_ON_CPU, _LEAST_ON_CPU) if on_cpu else (on_device, on_device)
        self._pace = Pace(max_itl, n_beside, n_least)
        least = self._pace.least(ctx.n_batch)
        self._admission = Admission(ctx, texts.needs_points, overcommit, least)
        self._readings = Readings(ctx, texts, self._admission)
        self._has_read = False  # whether a part of a reading was decoded in the step before, or in this one
        # from one spare resume point of a prompt to the next; 0: devices lose too much in small chunks
        self._spacing = _ENOUGH_ON_CPU if on_cpu else 0
        self._speculation = None
        if drafter is not None:
            every = EVERY if shares and texts.needs_points else 0
            self._speculation = Speculation(drafter, draft_max, every)
        self._keeps_states = any(group.kind == "state" for group in ctx.kv.groups)
        self._batch = Batch()
        self._is_broken = False
        self.mail = Mail()
        self._counts = dict.fromkeys(_COUNTED, 0)

    @property
    def _index(self) -> PrefixIndex:
        return self._texts.index

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        is_done = self.mail.is_empty and self._readings.is_empty
        return is_done and not (self._scheduler.running or self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """Counts since the beginning, and how it is now."""
        kv, scheduler, count = self._ctx.kv, self._scheduler, self._counts
        return EngineStats(
            steps=count["steps"],
            n_running=len(scheduler.running),
            n_waiting=len(scheduler.waiting) + self.mail.n_branches,
            n_parked=len(self._texts.parked),
            n_preempted=self._texts.n_preempted,
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
        self._take_news()
        self.mail.run_errands(self._texts)
        self._read_part()
        begin = time.perf_counter()
        self._take_fetched()
        self._say_late()
        self._admit()
        shift_full(self._texts)
        self.mail.show(self.look)
        if not (chunks := self._chosen()):
            if any(branch.unsaid is not None for branch in self._scheduler.running):
                time.sleep(_GRAMMAR_IDLE)
            elif self._fetches and self._fetches.any and not self._readings.has_begun:
                self._fetches.wait()
            return
        self._scheduler.count_idle(chunks)
        chunks = self._with_drafts(chunks)
        self._run(chunks)
        n_talking = sum(chunk.talks for chunk in chunks)
        n_tokens = sum(chunk.n for chunk in chunks)
        seconds = time.perf_counter() - begin
        self._pace.learn(n_talking, n_tokens - n_talking, seconds)
        if self._speculation:
            self._speculation.time(chunks, seconds)
        self._counts["steps"] += 1

    def end_all(self, error: BaseException | None) -> None:
        """Every request ends: cancelled, or with the error. The cache stays as it is: no step may follow."""
        self._is_broken = self._is_broken or error is not None
        why = error or InvalidArgumentError("the engine was closed meanwhile")
        self._readings.end(why)
        left = [
            *self.mail.end(why),
            *self._scheduler.running,
            *self._scheduler.waiting,
            *self._texts.parked,
        ]
        for queue in (self._scheduler.running, self._scheduler.waiting, self._texts.parked):
            queue.clear()
        for branch in left:
            if error is None:
                _end_with_forks(branch, time.perf_counter())
            else:
                branch.request._fail(error)

    def close(self) -> None:
        """Frees the context, and the draft model's; what the index has goes to the disk first."""
        if self._fetches:
            self._fetches.close(None if self._is_broken else self._texts)
        self.abandon()

    def abandon(self) -> None:
        """As close(), in a child process: the threads of tiers are not there."""
        self._ctx.close()
        if self._speculation:
            self._speculation.close()

    # ---- who comes and goes

    def _take_news(self) -> None:
        for new in self.mail.read():
            if isinstance(new, Branch):
                self._scheduler.arrive(new)
            elif isinstance(new, Reading):
                self._readings.add(new)
            elif isinstance(new, Parking):
                new.run(self._texts)
            else:
                now = time.perf_counter()
                for branch in self._texts.of(new):
                    self._texts.remove(branch)
                    _end_with_forks(branch, now)

    def _admit(self) -> None:
        """Waiting texts enter, in their order, while there are sequences and cells for them."""
        if self._readings.waits_for_cells:
            return
        first = self._scheduler.waiting.first()
        if self._needs_points and self._shares:
            mark_partings(first, self._scheduler.running)
        for branch in first:
            if branch.request.done:  # its rows were lost while others entered
                continue
            if branch.n_seqs > self._scheduler.n_free_seqs:
                return
            if branch.own is not None:
                fits = self._admission.fits(self._scheduler.running, branch, 0)
                if not (fits and self._texts.put_back(branch, branch.own)):
                    return
                continue
            found = self._find(branch)
            if self._shares and is_coming(branch, found.n, self._scheduler.running, self._needs_points):
                continue
            if self._enter(branch, found):
                continue
            if self._scheduler.running or self._readings.has_begun:
                return
            self._index.clear()  # it fits an empty cache: submit() has seen to that
            self._enter(branch, self._find(branch))

    def _find(self, branch: Branch) -> Found:
        """What the cache has of it; but for the last token, which is decoded for its output."""
        ids = branch.ids if self._shares else branch.ids[:0]
        return self._index.find(ids, len(branch.ids) - 1, branch.salt)

    def _enter(self, branch: Branch, found: Found) -> bool:
        """It runs, if its cells will be there."""
        running = self._scheduler.running
        if not self._admission.fits(running, branch, found.n):
            return False
        plan = self._fetches.plan(branch.ids, branch.salt, found) if self._fetches else None
        known = min(found.match.n, len(branch.ids) - 1)
        self._scheduler.enter(branch)
        found = self._attached(branch, plan.found if plan else found, moves=plan is None)
        if not self._admission.fits(running, branch, found.n):
            self._texts.let_go(branch)
            self._scheduler.leave(branch)
            self._scheduler.wait(branch)
            return False
        if self._fetches and plan:
            if found.n == plan.found.n and self._fetches.start(branch, plan, self._texts):
                return True
            found = self._attached_again(branch)
        self._begin(branch, found.n, known)
        return True

    def _begin(self, branch: Branch, n: int, known: int) -> None:
        """It has n tokens of its text, of which the cache knew more, perhaps, and decodes the rest."""
        if branch.n_cached < 0:
            branch.enter(n, max(known - n, 0))
            self._counts["prompt_tokens"] += branch.n_prompt
            self._counts["prefix_hit_tokens"] += branch.n_cached
            self._counts["decoded_again"] += branch.n_again
        if self._needs_points and self._shares:
            for place in (*range(EVERY, len(branch.ids), EVERY), len(branch.ids) - 1, known):
                branch.add_place(place)
            branch.spacing = self._spacing

    def _take_fetched(self) -> None:
        """Texts go on behind what has come from outside the cells; else with what the cells have."""
        if self._fetches is None:
            return
        for branch, fetch in self._fetches.finished():
            if self._fetches.show(branch, fetch, self._texts):
                branch.begin(fetch.plan.n)
                self._begin(branch, fetch.plan.n, fetch.plan.known)
            else:
                found = self._attached_again(branch)
                self._begin(branch, found.n, min(found.match.n, len(branch.ids) - 1))

    def _attached_again(self, branch: Branch) -> Found:
        """Its sequence has what the cells have of it, and nothing else."""
        self._texts.let_go(branch)
        return self._attached(branch, self._find(branch), moves=True)

    def _attached(self, branch: Branch, found: Found, *, moves: bool) -> Found:
        """Its sequence has the most that can be had of it; returns what that is."""
        moves = moves and self._reuse > 0
        if moves and (n := attach_moved(self._texts, branch, found, self._reuse)):
            branch.begin(n)
            return Found(found.match, n, None)
        if moves:
            found = self._find(branch)  # room that was made for parts may have been of it
        try:
            branch.last = self._index.attach(found, branch.seq)
        except (KVGraphError, MemoryError):  # what can't be shared is decoded
            found = Found(found.match, 0, None)
            branch.last = self._index.attach(found, branch.seq)
        branch.begin(found.n)
        return found

    # ---- what a step decodes

    def _read_part(self) -> None:
        """Of a reading; in turns with prompts: with a part of each, a step would last twice as long."""
        running = self._scheduler.running
        is_prompts_turn = self._has_read and not all(each.talks for each in running)
        n_tokens = self._pace.n_prompt_tokens(len(running), self._ctx.n_batch)
        if running:  # their tokens take a decode of their own in this step
            n_tokens = min(n_tokens, self._pace.n_least)
        self._has_read = not is_prompts_turn and self._readings.read_part(n_tokens)

    def _chosen(self) -> list[Chunk]:
        """Chunks for which there are cells; the youngest texts are set aside until there are enough."""
        while True:
            n_talking = sum(each.talks for each in self._scheduler.running)
            n_tokens = self._pace.n_prompt_tokens(n_talking, self._ctx.n_batch)
            chunks = self._scheduler.chunks(0 if self._has_read and n_talking else n_tokens)
            if not chunks or self._index.make_room(sum(chunk.n for chunk in chunks)):
                return chunks
            youngest = self._scheduler.youngest()
            if len(self._scheduler.running) > 1 or self._readings.has_begun:
                self._texts.set_aside(youngest)
            else:
                self._texts.fail(youngest, CacheFullError("the cache has too few cells for this request"))

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        if self._speculation is None:
            return chunks
        drafted = self._speculation.add(chunks, self._room_for_drafts)
        if drafted is chunks:
            return chunks
        n_tokens = sum(chunk.n + len(chunk.draft) for chunk in drafted)
        return drafted if self._index.make_room(n_tokens) else chunks

    def _room_for_drafts(self, n_tokens: int) -> int:
        room = self._admission.room_for_drafts(self._scheduler.running, n_tokens)
        return min(room, self._ctx.n_ubatch - n_tokens)

    def _run(self, chunks: list[Chunk]) -> None:
        """Decodes the chunks together; when that fails, without drafts, then each half.

        Only who fails alone gets the error.
        """
        # a sample that failed has taken the others of its request along
        chunks = [chunk for chunk in chunks if chunk.branch.runs]
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
                self._texts.fail(chunks[0].branch, error)
                self._texts.start_over_if_broken()
            return
        for chunk in chunks:
            self._advance(chunk.branch, chunk.n, to_end=chunk.ends and chunk.n > 1)
        ending = [chunk for chunk in chunks if chunk.ends]
        now = time.perf_counter()
        for chunk, rows in zip(ending, outputs, strict=True):
            forks = self._fork(chunk.branch)
            if chunk.branch.runs:
                self._say_drafted(chunk, rows, now)
            for each in forks:
                if each.runs:
                    self._say(each, rows[0], now)

    def _decode(self, chunks: list[Chunk]) -> list[list[LastOutput]]:
        """One batch: the outputs of the chunks that end; those of a draft too."""
        batch, ctx = self._batch, self._ctx
        batch.clear()
        talking = [chunk.branch for chunk in chunks if chunk.talks and not chunk.draft]
        if talking:
            batch.add_each(
                [each.ids[-1] for each in talking],
                [each.n_decoded for each in talking],
                [each.seq for each in talking],
            )
        for branch, n, ends, draft in (chunk for chunk in chunks if not chunk.talks or chunk.draft):
            begin, n_drafted = branch.n_decoded, len(draft)
            last = branch.ids[begin : begin + n]
            if draft:
                # of a window everything stays that the last token saw; states are kept behind each token
                behind = range(begin + 1, begin + 1 + n_drafted) if self._keeps_states else ()
                batch.extend([*last, *draft], begin, (branch.seq,), "all", behind)
            else:
                batch.extend(last, begin, (branch.seq,), "last" if ends else False)
        others = [chunk for chunk in chunks if chunk.ends and (not chunk.talks or chunk.draft)]
        in_batch = [*((each, 1) for each in talking), *((c.branch, 1 + len(c.draft)) for c in others)]
        ctx.set_adapters(chunks[0].branch.adapters)
        rows = iter(ctx.decode_rows(batch))
        self._counts["decoded"] += len(batch)
        for chunk in chunks:
            chunk.branch.n_beyond = len(chunk.draft)
        outputs = {id(branch): [next(rows) for _ in range(n)] for branch, n in in_batch}
        return [outputs[id(chunk.branch)] for chunk in chunks if chunk.ends]

    def _advance(self, branch: Branch, n: int, to_end: bool) -> None:
        """These tokens of it are in the cache: the index learns of them."""
        branch.n_decoded += n
        if not self._shares:
            return
        self._texts.keep(branch, to_end=to_end)
        if self._needs_points:
            is_kept = branch.is_at_place or branch.n_decoded % EVERY == 0
            if is_kept or branch.is_at_spare_place:
                assert branch.last is not None
                self._index.add_point(
                    branch.last, branch.ids, branch.n_decoded, branch.seq, is_spare=not is_kept
                )
        self._texts.copy(branch, to_end)

    def _fork(self, branch: Branch) -> list[Branch]:
        """The other samples of a request whose prompt was just decoded: they see its cells."""
        if not branch.runs:
            return []
        forks = self._scheduler.fork(branch)
        try:
            for each in forks:
                self._ctx.kv.seq_cp(branch.seq, each.seq, -1, -1)
                each.follow(branch)
                if branch.last is not None:
                    self._index.pin(branch.last)
        except (KVGraphError, MemoryError) as error:
            self._texts.fail(branch, error)
        return forks

    def _say_drafted(self, chunk: Chunk, outputs: list[LastOutput], now: float) -> None:
        """Says a token by each row, up to the first that isn't the draft's; what is behind it goes.

        Every token is what the text's own sampler makes of the row behind the tokens before it: the same one
        as without drafts.
        """
        branch, draft = chunk.branch, chunk.draft
        n_before = len(branch.ids)
        branch.record.drafted += len(draft)
        self._counts["drafted"] += len(draft)
        self._say(branch, outputs[0], now)
        for token, output in zip(draft, outputs[1:], strict=True):
            if not branch.runs or branch.unsaid is not None or branch.ids[-1] != token:
                break
            branch.record.accepted += 1
            self._counts["accepted"] += 1
            branch.n_decoded += 1
            branch.n_beyond -= 1
            self._say(branch, output, now)
        if not branch.runs:
            return
        if self._speculation:
            self._speculation.learn(branch, n_before)
        if draft and not self._texts.cut(branch):
            self._texts.set_aside(branch)
        elif draft:
            self._advance(branch, 0, to_end=False)

    def _say_late(self) -> None:
        """Texts say what their grammars have allowed meanwhile."""
        for branch in [each for each in self._scheduler.running if each.unsaid is not None]:
            output, branch.unsaid = branch.unsaid, None
            if branch.runs and output is not None:
                self._say(branch, output, -math.inf)

    def _say(self, branch: Branch, output: LastOutput, decoded: float) -> None:
        """Says a token, unless its grammar takes too long: the others don't wait for that. decoded: when."""
        patience = decoded + _GRAMMAR_PATIENCE - time.perf_counter()
        try:
            if not branch.can_say(max(patience, 0.0)):
                branch.unsaid = output._replace(logits=output.logits.copy())
                return
            now = time.perf_counter()
            reason = branch.say(output, now)
        except (KVGraphError, MemoryError) as error:
            self._texts.fail(branch, error)
            return
        if reason is not None:
            self._texts.leave(branch)
            branch.end(reason, now)


def _end_with_forks(branch: Branch, now: float) -> None:
    for each in (branch, *branch.forks):
        each.end("cancelled", now)

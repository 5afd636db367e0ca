"""The engine's step: who enters, what is decoded, what is said, what the index keeps of it."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future

from pykvgraph.batch import Batch
from pykvgraph.context import Context, LastOutput
from pykvgraph.engine.branch import Branch
from pykvgraph.engine.errand import Errand
from pykvgraph.engine.pace import Pace
from pykvgraph.engine.request import Request
from pykvgraph.engine.scheduler import Chunk, Scheduler
from pykvgraph.errors import CacheFullError, InvalidArgumentError, KVGraphError
from pykvgraph.kept_text import EVERY
from pykvgraph.prefix import block
from pykvgraph.prefix.index import Found, PrefixIndex
from pykvgraph.prefix.node import Node
from pykvgraph.types import EngineLook, EngineStats

_N_COMPARED = 64  # waiting texts with which a new one is compared
_MOST_PARTINGS = 8
_ENOUGH_ON_CPU = 64  # tokens of prompts; in steps of 512 each takes as long (docs/many-requests.md)
_N_SHOWN = 64  # waiting texts, to those who look


class Stepper:
    """Decodes many texts on one context, a batch a step. Not for several threads at once.

    overcommit: a text enters when its prompt fits; without, when all that it may become fits.
    """

    def __init__(
        self, ctx: Context, n_points: int, shares: bool, overcommit: bool, max_itl: float | None
    ) -> None:
        self._ctx = ctx
        self._shares = shares
        self._overcommit = overcommit
        # layers with a window, or with states, go on from resume points only
        self._needs_points = n_points > 0
        self._index = PrefixIndex(ctx.kv, n_points)
        self._scheduler = Scheduler(ctx.n_seq_max, ctx.n_batch)
        on_cpu = ctx.model.device == "CPU"
        self._pace = Pace(max_itl, _ENOUGH_ON_CPU if on_cpu else max(ctx.n_batch // 4, 1))
        # from one spare resume point of a prompt to the next; 0: devices lose too much in small chunks
        self._spacing = _ENOUGH_ON_CPU if on_cpu else 0
        self._batch = Batch()
        # texts that come, requests that are cancelled, errands, and those who want to look
        self.news: deque[Branch | Request | Errand | Future[EngineLook]] = deque()
        self._errands: deque[Errand] = deque()
        self._lookers: list[Future[EngineLook]] = []
        self._counts = dict.fromkeys(
            ("steps", "prompt_tokens", "prefix_hit_tokens", "decoded_again", "decoded", "preempted"), 0
        )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.news or self._errands or self._scheduler.running or self._scheduler.waiting)

    def stats(self) -> EngineStats:
        """Counts since the beginning, and how it is now."""
        kv, scheduler, count = self._ctx.kv, self._scheduler, self._counts
        return EngineStats(
            steps=count["steps"],
            n_running=len(scheduler.running),
            n_waiting=len(scheduler.waiting) + sum(isinstance(each, Branch) for each in tuple(self.news)),
            n_preempted=count["preempted"],
            prompt_tokens=count["prompt_tokens"],
            prefix_hit_tokens=count["prefix_hit_tokens"],
            decoded_again=count["decoded_again"],
            decoded_tokens=count["decoded"],
            cells_used=tuple(group.n_used for group in kv.groups),
            n_blocks=self._index.n_nodes,
            n_resume_points=self._index.n_points,
        )

    def look(self) -> EngineLook:
        """The cells and the texts as they are now."""
        kv, scheduler, now = self._ctx.kv, self._scheduler, time.perf_counter()
        groups = kv.groups
        return EngineLook(
            seconds=now,
            stats=self.stats(),
            running=tuple(each.look(now) for each in scheduler.running),
            waiting=tuple(each.look(now) for each in scheduler.waiting[:_N_SHOWN]),
            groups=groups,
            views=tuple(kv.cells(index) for index in range(len(groups))),
        )

    def step(self) -> None:
        """Takes what is new, lets waiting texts enter, decodes one batch, and hands out what was said."""
        begin = time.perf_counter()
        self._take_news()
        self._run_errands()
        self._admit()
        self._shift_full()
        self._show()
        chunks = self._chosen()
        if not chunks:
            return
        self._scheduler.count_idle(chunks)
        self._run(chunks)
        n_talking = sum(chunk.talks for chunk in chunks)
        n_tokens = sum(chunk.n for chunk in chunks)
        self._pace.learn(n_talking, n_tokens - n_talking, time.perf_counter() - begin)
        self._counts["steps"] += 1

    def end_all(self, error: BaseException | None) -> None:
        """Every request ends: cancelled, or with the error. The cache stays as it is: no step may follow."""
        new = [each for each in self.news if isinstance(each, Branch)]
        asked = [each.done for each in (*self._errands, *self.news) if isinstance(each, Errand)]
        asked += [*self._lookers, *(each for each in self.news if isinstance(each, Future))]
        self._errands.clear()
        self._lookers.clear()
        for future in asked:
            future.set_exception(error or InvalidArgumentError("the engine was closed meanwhile"))
        left = [*new, *self._scheduler.running, *self._scheduler.waiting]
        for queue in (self.news, self._scheduler.running, self._scheduler.waiting):
            queue.clear()
        for branch in left:
            if error is None:
                _end_with_forks(branch, time.perf_counter())
            else:
                branch.request._fail(error)

    # ---- who comes and goes

    def _take_news(self) -> None:
        for _ in range(len(self.news)):  # what comes meanwhile is for the next step
            new = self.news.popleft()
            if isinstance(new, Branch):
                if self._needs_points and self._shares:
                    self._mark_partings(new)
                self._scheduler.arrive(new)
            elif isinstance(new, Errand):
                self._errands.append(new)
            elif isinstance(new, Future):
                self._lookers.append(new)
            else:
                for branch in self._of(new):
                    branch.cancelled = True
        self._end_cancelled()

    def _run_errands(self) -> None:
        """As many as there are free sequences for."""
        while self._errands and self._scheduler.n_free_seqs:
            seq = self._scheduler.borrow()
            try:
                self._errands.popleft().run(self._index, seq)
            finally:
                self._ctx.kv.seq_rm(seq, -1, -1)
                self._scheduler.give_back(seq)
            self._start_over_if_broken()

    def _show(self) -> None:
        """Tells those who look what there is."""
        if not self._lookers:
            return
        lookers, self._lookers = self._lookers, []
        try:
            look = self.look()
        except Exception as error:
            for each in lookers:
                each.set_exception(error)
        else:
            for each in lookers:
                each.set_result(look)

    def _of(self, request: Request) -> list[Branch]:
        scheduler = self._scheduler
        return [each for each in [*scheduler.running, *scheduler.waiting] if each.request is request]

    def _end_cancelled(self) -> None:
        now = time.perf_counter()
        for branch in [each for each in self._scheduler.waiting if each.cancelled]:
            self._scheduler.waiting.remove(branch)
            _end_with_forks(branch, now)
        for branch in [each for each in self._scheduler.running if each.cancelled]:
            self._leave(branch)
            _end_with_forks(branch, now)

    def _mark_partings(self, new: Branch) -> None:
        """Where the new text parts from others, a point is worth having: more are likely to part there."""
        for other in [*self._scheduler.running, *self._scheduler.waiting[:_N_COMPARED]]:
            n = _common(new, other)
            if n < block.N_TOKENS or other.salt != new.salt:
                continue
            for branch in (new, other):
                near = any(abs(place - n) < block.N_TOKENS for place in branch.places)
                if not near and len(branch.places) < _MOST_PARTINGS:
                    branch.add_place(n)

    def _admit(self) -> None:
        """Waiting texts enter, in their order, while there are sequences and cells for them."""
        for branch in self._scheduler.waiting[:_N_COMPARED]:
            if branch.n_seqs > self._scheduler.n_free_seqs:
                return
            found = self._find(branch)
            if self._is_coming(branch, found.n):
                continue
            if not self._fits(branch, found):
                if self._scheduler.running:
                    return
                self._index.clear()  # it fits an empty cache: submit() has seen to that
                found = self._find(branch)
            self._enter(branch, found)

    def _find(self, branch: Branch) -> Found:
        """What the cache has of it; but for the last token, which is decoded for its output."""
        ids = branch.ids if self._shares else branch.ids[:0]
        return self._index.find(ids, len(branch.ids) - 1, branch.salt)

    def _is_coming(self, branch: Branch, n: int) -> bool:
        """Whether a running text is about to decode more of what both begin with: worth waiting for."""
        if not self._shares:
            return False
        for other in self._scheduler.running:
            if other.talks or other.salt != branch.salt:
                continue
            common = min(_common(branch, other), len(branch.ids) - 1)
            if common - n < block.N_TOKENS:
                continue
            if self._needs_points:
                if any(n + block.N_TOKENS <= place <= common for place in other.places):
                    return True
            elif other.n_decoded < min(-(-common // block.N_TOKENS) * block.N_TOKENS, len(other.ids)):
                return True
        return False

    def _fits(self, branch: Branch, found: Found) -> bool:
        """Whether its cells will be there, whatever those inside may still take."""
        running = self._scheduler.running
        # nodes that nobody has pinned, but whose cells would stay with the texts that see them
        seen = sum(each.n_part + each.n_end for each in running)
        free = self._ctx.kv.n_free + self._index.n_evictable - seen
        free -= sum(node.n_tokens for node in found.match.path if not node.n_pins) + found.match.run
        if self._overcommit:
            return len(branch.ids) - found.n <= free - len(running)
        return branch.cells_to_take(found.n) <= free - sum(each.still_to_take for each in running)

    def _enter(self, branch: Branch, found: Found) -> None:
        self._scheduler.enter(branch)
        try:
            branch.last = self._index.attach(found, branch.seq)
        except (KVGraphError, MemoryError):  # what can't be shared is decoded
            found = Found(found.match, 0, None)
            branch.last = self._index.attach(found, branch.seq)
        branch.begin(found.n)
        branch.n_part = found.n - branch.last.end
        known = min(found.match.n, len(branch.ids) - 1)
        if branch.n_cached < 0:
            branch.enter(found.n, known - found.n)
            self._counts["prompt_tokens"] += branch.n_prompt
            self._counts["prefix_hit_tokens"] += found.n
            self._counts["decoded_again"] += branch.n_again
        if self._needs_points and self._shares:
            for place in (*range(EVERY, len(branch.ids), EVERY), len(branch.ids) - 1, known):
                branch.add_place(place)
            branch.spacing = self._spacing

    def _leave(self, branch: Branch) -> None:
        """The text's sequence is free again; the index keeps its cells."""
        if branch.last is not None:
            if self._shares:
                self._keep(branch, to_end=True)
                if self._needs_points and branch.n_decoded:
                    self._index.add_point(branch.last, branch.ids, branch.n_decoded, branch.seq)
            self._let_go(branch, branch.last)
            branch.last = None
        self._ctx.kv.seq_rm(branch.seq, -1, -1)
        self._scheduler.leave(branch)
        branch.n_decoded = branch.n_part = 0

    def _let_go(self, branch: Branch, last: Node) -> None:
        """The text needs what the index has up to this node no longer."""
        others = [each for each in self._scheduler.running if each is not branch]
        self._index.hand_over(last, [(each.last, each.seq) for each in others if each.last])
        self._index.unpin(last)

    def _set_aside(self, branch: Branch) -> None:
        """It waits again; what it has stays in the cache for as long as nobody needs the cells."""
        self._leave(branch)
        self._scheduler.wait(branch)
        self._counts["preempted"] += 1

    def _fail(self, branch: Branch, error: BaseException) -> None:
        """The request ends with the error, all of its samples too."""
        for each in self._of(branch.request):
            if each in self._scheduler.running:
                self._leave(each)
            else:
                self._scheduler.waiting.remove(each)
        branch.request._fail(error)

    # ---- texts that have filled their windows

    def _shift_full(self) -> None:
        for branch in list(self._scheduler.running):
            window = branch.window
            if branch.runs and window is not None and branch.talks and window.is_full(branch.n_decoded):
                self._shift(branch, window.discarded(branch.n_decoded))

    def _shift(self, branch: Branch, gone: range) -> None:
        """Gives up these tokens; the index keeps the text as it was, while nobody needs the cells."""
        self._retreat(branch, gone.start)
        if not self._room_to_move(branch, gone.stop):
            return
        branch.give_up(gone)
        try:
            self._ctx.kv.seq_rm(branch.seq, gone.start, gone.stop)
            self._ctx.kv.seq_add(branch.seq, gone.stop, -1, -len(gone))
        except (KVGraphError, MemoryError) as error:
            self._fail(branch, error)
            self._start_over_if_broken()

    def _retreat(self, branch: Branch, n: int) -> None:
        """From now on the text needs of what the index has its first n tokens alone."""
        node = last = branch.last
        assert node is not None and last is not None
        while node.end > n:
            assert node.parent is not None
            node = node.parent
        if node is not last:
            self._index.pin(node)
            self._let_go(branch, last)
        branch.last, branch.n_part = node, n - node.end

    def _room_to_move(self, branch: Branch, begin: int) -> bool:
        """Makes room for copies of the cells from `begin` on that others see; False: it does not run now."""
        kv = self._ctx.kv
        while kv.n_free < kv.seq_count(branch.seq, begin, -1).n_shared:
            if self._index.evict():
                continue
            youngest = self._scheduler.youngest()
            self._set_aside(youngest)
            if youngest is branch:
                return False
        return True

    # ---- what a step decodes

    def _chosen(self) -> list[Chunk]:
        """Chunks for which there are cells; the youngest texts are set aside until there are enough."""
        while True:
            n_talking = sum(each.talks for each in self._scheduler.running)
            chunks = self._scheduler.chunks(self._pace.n_prompt_tokens(n_talking, self._ctx.n_batch))
            if not chunks or self._index.make_room(sum(chunk.n for chunk in chunks)):
                return chunks
            youngest = self._scheduler.youngest()
            if len(self._scheduler.running) == 1:
                self._fail(youngest, CacheFullError("the cache has too few cells for this request"))
            else:
                self._set_aside(youngest)

    def _run(self, chunks: list[Chunk]) -> None:
        """Decodes the chunks together; when that fails, each half; only who fails alone gets the error."""
        # a sample that failed has taken the others of its request along
        chunks = [chunk for chunk in chunks if chunk.branch.runs]
        if not chunks:
            return
        try:
            outputs = self._decode(chunks)
        except (KVGraphError, MemoryError) as error:
            if isinstance(error, CacheFullError) and self._index.drop_point():
                self._run(chunks)  # resume points keep cells of windows
            elif len(chunks) > 1:
                half = len(chunks) // 2
                self._run(chunks[:half])
                self._run(chunks[half:])
            else:
                self._fail(chunks[0].branch, error)
                self._start_over_if_broken()
            return
        for chunk in chunks:
            self._advance(chunk)
        talking = [chunk.branch for chunk in chunks if chunk.ends]
        now = time.perf_counter()
        for branch, output in zip(talking, outputs, strict=True):
            for each in (branch, *self._fork(branch)):
                if each.runs:
                    self._say(each, output, now)

    def _decode(self, chunks: list[Chunk]) -> list[LastOutput]:
        """One batch: the outputs of the chunks that end."""
        batch, ctx = self._batch, self._ctx
        batch.clear()
        talking = [chunk.branch for chunk in chunks if chunk.talks]
        if talking:
            batch.add_each(
                [each.ids[-1] for each in talking],
                [each.n_decoded for each in talking],
                [each.seq for each in talking],
            )
        for chunk in chunks:
            if not chunk.talks:
                branch, n, ends = chunk
                begin = branch.n_decoded
                batch.extend(branch.ids[begin : begin + n], begin, (branch.seq,), "last" if ends else False)
        ctx.decode(batch, scores=True)
        self._counts["decoded"] += len(batch)
        return self._outputs([*talking, *(c.branch for c in chunks if c.ends and c.n > 1)], chunks)

    def _outputs(self, in_batch: list[Branch], chunks: list[Chunk]) -> list[LastOutput]:
        """The outputs in the order of the chunks; the batch has those that talk first."""
        if not in_batch:
            return []
        scores = self._ctx.scores()
        rows = self._ctx.logits_view()
        found = zip(
            scores.best.tolist(), scores.best_logprob.tolist(), scores.log_sum.tolist(), rows, strict=True
        )
        by_branch = {id(branch): LastOutput(*output) for branch, output in zip(in_batch, found, strict=True)}
        return [by_branch[id(chunk.branch)] for chunk in chunks if chunk.ends]

    def _advance(self, chunk: Chunk) -> None:
        """The chunk is in the cache: the index learns of it."""
        branch = chunk.branch
        branch.n_decoded += chunk.n
        if not self._shares:
            return
        self._keep(branch, to_end=chunk.ends and chunk.n > 1)
        if self._needs_points:
            is_kept = branch.is_at_place or branch.n_decoded % EVERY == 0
            if is_kept or branch.is_at_spare_place:
                assert branch.last is not None
                self._index.add_point(
                    branch.last, branch.ids, branch.n_decoded, branch.seq, is_spare=not is_kept
                )

    def _keep(self, branch: Branch, to_end: bool) -> None:
        assert branch.last is not None
        n = min(branch.n_decoded, branch.n_true)
        if to_end or n - branch.last.end >= block.N_TOKENS:
            branch.last = self._index.extend(branch.last, branch.ids, n, branch.seq, to_end=to_end)
            branch.n_end = n - branch.last.end if to_end else 0

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
            self._fail(branch, error)
        return forks

    def _say(self, branch: Branch, output: LastOutput, now: float) -> None:
        try:
            reason = branch.say(output, now)
        except KVGraphError as error:
            self._fail(branch, error)
            return
        if reason is not None:
            self._leave(branch)
            branch.end(reason, now)

    def _start_over_if_broken(self) -> None:
        """A device that failed in the midst of moving cells has left no cell usable."""
        if self._scheduler.running:
            return
        try:
            self._ctx.kv.update()
        except KVGraphError:
            self._ctx.reset()
            self._index = self._index.renewed()


def _common(left: Branch, right: Branch) -> int:
    """With how many tokens both begin."""
    n = min(len(left.ids), len(right.ids))
    return block.common(left.ids[:n].tobytes(), right.ids[:n].tobytes())


def _end_with_forks(branch: Branch, now: float) -> None:
    for each in (branch, *branch.forks):
        each.end("cancelled", now)

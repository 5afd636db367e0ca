"""Random operations on a cache with recurrent states, beside the same in plain Python (support.naive_states).

The judge of logits is a fresh context. Where attention is silent it decodes what the state has read, whatever
was removed since; else nothing is removed or moved in the middle, and it decodes what the sequence sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

import pykvgraph as kvg
from pykvgraph.kv_cache.hold import ResumePoint
from support import chance
from support.engines import Logits, Token, decode
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB
from support.naive_states import Checkpoint, NaiveStates, Range, Row, Seen, Text

N_SEQ, MOST = 4, 90  # sequences, and tokens that one has read
STEP_SITES = ["cells", "compute", "state-take", "state-keep"]


@dataclass
class Shared:
    """What a hold and a resume point keep."""

    cells: list[Seen]
    row: Row
    hold: kvg.Hold
    point: ResumePoint


class Runner:
    """A context, and what it must have. A call that is refused or fails changes nothing."""

    def __init__(
        self, ctx: kvg.Context, fresh: kvg.Context, seed: int, silent: bool, rule: float = 1e-6
    ) -> None:
        self.ctx, self.kv, self.fresh, self.silent, self.rule = ctx, ctx.kv, fresh, silent, rule
        self.rng = np.random.default_rng(chance.number(seed))
        self.naive = NaiveStates(N_SEQ)
        self.shared: list[Shared] = []
        self.saved: list[tuple[bytes, list[Text]]] = []
        self.windows = any(group.window for group in self.kv.groups)
        self.n_rows = self.kv.groups[-1].n_cells
        self.counts: Counter[str] = Counter()
        self.worst = 0.0
        self.weights: dict[Callable[[int], bool], int] = {
            self.append: 14,
            self.append_together: 4,
            self.copy: 2,
            self.copy_a_part: 4,
            self.checkpoint: 9,
            self.rewind: 3,
            self.go_back: 3,
            self.share: 2,
            self.attach: 3,
            self.save: 2,
            self.load: 3,
            self.defrag: 2,
            self.drop: 1,
            self.keep: 1,
            self.clear: 1,
        }
        if silent:
            self.weights |= {self.remove: 4, self.shift: 3, self.move: 3, self.divide: 1}

    def step(self) -> None:
        operations = list(self.weights)
        chances = np.array(list(self.weights.values()), float)
        operation = operations[self.rng.choice(len(operations), p=chances / chances.sum())]
        if operation in (self.clear, self.keep) and self.below(6):
            return
        done = operation(self.below(N_SEQ))
        self.counts[f"{operation.__name__} {'done' if done else 'not'}"] += 1
        self.check()

    def below(self, n: int) -> int:
        return int(self.rng.integers(max(1, n)))

    def check(self) -> None:
        """Cells, checkpoints, rows and their users."""
        naive = self.naive
        for seq, text in enumerate(naive.texts):
            there = self.kv.checkpoints(seq)
            assert set(there) <= set(text.checkpoints), (seq, there, text.checkpoints)
            gone = set(text.checkpoints) - set(there)
            self.counts["evicted"] += len(gone)
            for p in gone:
                del text.checkpoints[p]
            for index, group in enumerate(self.kv.groups[:-1]):
                view = self.kv.cells(index)
                positions = sorted(view.pos[view.seq[:, seq]].tolist())
                wanted = [token.pos for token in text.cells]
                assert positions == wanted[len(wanted) - len(positions) if group.window else 0 :]
        rows = self.kv.cells(len(self.kv.groups) - 1)
        found = Counter(
            (frozenset(np.flatnonzero(seqs).tolist()), int(n))
            for seqs, n in zip(rows.seq, rows.held, strict=True)
            if seqs.any() or n
        )
        assert found == naive.users(), (found, naive.users())
        n_used = self.kv.groups[-1].n_used
        assert n_used - found.total() in (0, naive.n_replaced())

    def refused(self, call: Callable[[], object], must: bool) -> bool:
        """Whether the call was; must: whether it has to be. No room is always a reason."""
        try:
            call()
        except kvg.CacheFullError:
            self.counts["no room"] += 1
        except (kvg.InvalidArgumentError, kvg.UnsupportedError) as refusal:
            lost = self.windows and "lost" in str(refusal)
            assert must or lost, refusal
            self.counts["lost" if lost and not must else "refused"] += 1
        else:
            assert not must
            return False
        self.check()
        return True

    # ---- steps ----

    def ids(self, n: int) -> list[int]:
        return [3 + self.below(N_VOCAB - 3) for _ in range(n)]

    def run(self, seqs: tuple[int, ...], pos: int, n: int) -> list[Token]:
        return [Token(token, pos + i, seqs) for i, token in enumerate(self.ids(n))]

    def room_for(self, seq: int) -> bool:
        row = self.naive.texts[seq].row
        return len(row.read if row else ()) < MOST

    def append(self, seq: int) -> bool:
        """Tokens of some sequences, among each other."""
        runs = []
        for other in {seq, *(s for s in range(N_SEQ) if self.below(3) == 0)}:
            if self.room_for(other):
                gap = self.below(8) if self.below(10) == 0 and self.naive.texts[other].cells else 0
                runs.append(self.run((other,), self.naive.texts[other].next + gap, 1 + self.below(6)))
        return bool(runs) and self.decode(self.shuffled(runs))

    def shuffled(self, runs: list[list[Token]]) -> list[Token]:
        """In any order in which each run keeps its own."""
        left, tokens = [list(run) for run in runs if run], []
        while left:
            run = left[self.below(len(left))]
            tokens.append(run.pop(0))
            left = [run for run in left if run]
        return tokens

    def append_together(self, seq: int) -> bool:
        """Two or three sequences read the same tokens and part, beside another one."""
        seqs = [int(s) for s in self.rng.permutation(N_SEQ)]
        seqs.remove(seq)
        together = (seq, *seqs[: 1 + self.below(2)])
        if not self.room_for(seq):
            return False
        for other in together[1:]:
            self.drop(other)
            self.kv.seq_cp(seq, other, 0, -1)
            self.naive.copy(seq, other, Range.of(0, -1))
        pos = self.naive.texts[seq].next
        first = self.run(together, pos, self.below(4))
        parts = [self.run((s,), pos + len(first), self.below(4)) for s in together if self.below(2)]
        if len(together) > 2 and self.below(2):
            parts = [self.run(together[:2], pos + len(first), 1), self.run(together[2:], pos + len(first), 1)]
        alone = [self.run((s,), self.naive.texts[s].next, 2) for s in range(N_SEQ) if s not in together]
        tokens = self.shuffled([first, *alone][: 1 + len(first) % 2]) + self.shuffled(parts)
        tokens = [token for token in tokens if all(map(self.room_for, token.seq_ids))]
        return bool(tokens) and self.decode(tokens)

    def decode(self, tokens: list[Token]) -> bool:
        found: list[Logits] = []
        seqs = {seq for token in tokens for seq in token.seq_ids}
        must_fail = any(self.naive.texts[seq].is_lost for seq in seqs)
        site = STEP_SITES[self.below(len(STEP_SITES))] if self.below(8) == 0 else ""
        with fault(site, 1 + self.below(2)) if site else nullcontext():
            try:
                if self.refused(lambda: found.append(decode(self.ctx, tokens)), must_fail):
                    return False
            except kvg.KVGraphError:
                assert site
                self.counts["failed"] += 1
                return False
        self.naive.append((token.id, token.pos, token.seq_ids) for token in tokens)
        for seq in seqs:
            mine = [row for row, token in zip(found[0], tokens, strict=True) if seq in token.seq_ids]
            self.compare(seq, np.array(mine))
        return True

    def compare(self, seq: int, logits: Logits) -> None:
        text = self.naive.texts[seq]
        assert text.row
        tokens = [Token(*token) for token in text.cells]
        if self.silent:
            tokens = [Token(token, i) for i, token in enumerate(text.row.read)]
        else:
            assert text.row.read == tuple(token.id for token in text.cells)
        self.fresh.kv.clear()
        error = nmse(logits, decode(self.fresh, tokens)[-len(logits) :])
        self.worst = max(self.worst, error)
        assert error <= self.rule, (error, seq, text, self.counts)

    def next_is_right(self, seq: int) -> bool:
        text = self.naive.texts[seq]
        return self.room_for(seq) and self.decode(self.run((seq,), text.next, 1 + self.below(3)))

    # ---- copies ----

    def copy(self, seq: int) -> bool:
        to = self.below(N_SEQ)
        if self.below(3) and to != seq:
            self.drop(to)
        return self.copy_range(seq, to, -1 if self.below(2) else 0, -1)

    def copy_a_part(self, seq: int) -> bool:
        text, to = self.naive.texts[seq], (seq + 1) % N_SEQ
        if self.below(4):
            self.drop(to)
        ends = [*text.checkpoints] * 3 + [self.below(text.next + 2)]
        p0 = 0 if self.below(8) else self.below(text.next)
        return self.copy_range(seq, to, p0, ends[self.below(len(ends))]) and self.next_is_right(to)

    def copy_range(self, seq: int, to: int, p0: int, p1: int) -> bool:
        where = Range.of(p0, p1)
        if self.windows and p0 > 0:
            return False
        if self.refused(lambda: self.kv.seq_cp(seq, to, p0, p1), not self.naive.can_copy(seq, to, where)):
            return False
        self.naive.copy(seq, to, where)
        return True

    # ---- going back ----

    def checkpoint(self, seq: int) -> bool:
        text = self.naive.texts[seq]
        if self.refused(lambda: self.kv.checkpoint(seq), text.row is None):
            return False
        assert text.row
        text.checkpoints[text.next] = Checkpoint(text.row, self.naive.tick())
        return True

    def rewind(self, seq: int) -> bool:
        text = self.naive.texts[seq]
        near = [text.next, 0, *text.checkpoints, *text.checkpoints]
        p = near[self.below(len(near))] + self.below(7) - 1
        there = self.kv.rewind(seq, p)
        assert there == self.naive.rewind(seq, p)
        return self.next_is_right(seq)

    def go_back(self, seq: int) -> bool:
        text = self.naive.texts[seq]
        near = [self.below(text.next + 1), *text.checkpoints]
        return self.remove_range(seq, near[self.below(len(near))], -1) and self.next_is_right(seq)

    def remove(self, seq: int) -> bool:
        p0 = self.below(self.naive.texts[seq].next)
        return self.remove_range(seq, p0, p0 + 1 + self.below(12))

    def remove_range(self, seq: int, p0: int, p1: int) -> bool:
        where = Range.of(p0, p1)
        seqs = range(N_SEQ) if seq < 0 else [seq]
        must = not all(self.naive.can_remove(s, where) for s in seqs)
        if self.refused(lambda: self.kv.seq_rm(seq, p0, p1), must):
            return False
        for s in seqs:
            self.naive.remove(s, where)
        return True

    # ---- positions ----

    def shift(self, seq: int) -> bool:
        """A part from the middle goes, and what follows moves down."""
        text = self.naive.texts[seq]
        if text.next < 12:
            return False
        p0 = self.below(4)
        p1 = p0 + 1 + self.below(text.next - p0 - 2)
        return self.remove_range(seq, p0, p1) and self.move_range(seq, Range.of(p1, -1, p0 - p1))

    def move(self, seq: int) -> bool:
        next_ = self.naive.texts[seq].next
        p0 = self.below(next_)
        p1 = -1 if self.below(2) else p0 + self.below(next_)
        return self.move_range(seq, Range.of(p0, p1, self.below(30) - 20))

    def move_range(self, seq: int, change: Range) -> bool:
        if self.naive.texts[seq].next + change.delta > 150:
            return False
        must = not self.naive.can_move(seq, change)
        if self.refused(lambda: self.kv.seq_add(seq, change.p0, change.p1, change.delta), must):
            return False
        if change.delta:
            self.naive.move(seq, change)
        return True

    def divide(self, seq: int) -> bool:
        p0, d = self.below(self.naive.texts[seq].next), 1 + self.below(3)
        change = Range.of(p0, p0 + self.below(20), 0, d)
        if self.refused(lambda: self.kv.seq_div(seq, change.p0, change.p1, d), False):
            return False
        if d > 1:
            self.naive.move(seq, change)
        return True

    # ---- what is kept elsewhere ----

    def share(self, seq: int) -> bool:
        """Of a text without gaps, as holds want it."""
        text = self.naive.texts[seq]
        whole = [token.pos for token in text.cells] == list(range(text.next)) and text.next > 0
        if not whole or text.row is None or len(self.shared) > 2:
            return False
        made: list[ResumePoint] = []
        if self.refused(lambda: made.append(self.kv.resume_point(seq)), False):
            return False
        hold = self.kv.hold(seq, 0, -1)
        self.shared.append(Shared(list(text.cells), text.row, hold, made[0]))
        self.naive.points.append(text.row)
        return True

    def attach(self, seq: int) -> bool:
        if not self.shared:
            return False
        shared = self.shared[self.below(len(self.shared))]
        self.drop(seq)
        text = self.naive.texts[seq]
        assert not self.refused(lambda: self.kv.attach(shared.hold, seq), False)
        text.cells, text.row, text.checkpoints = list(shared.cells), None, {}
        self.check()
        if self.below(4) == 0:
            assert not self.next_is_right(seq)
        if self.below(8) == 0:
            return True  # nobody knows its state
        self.kv.attach(shared.point, seq)
        text.row = shared.row
        if self.below(3) == 0:
            self.shared.remove(shared)
            self.naive.points.remove(shared.row)
            shared.hold.release()
            shared.point.release()
        return self.next_is_right(seq)

    def save(self, seq: int) -> bool:
        seqs = range(N_SEQ) if self.below(3) == 0 else [seq]
        blob = self.kv.save(None if len(seqs) > 1 else seq)
        self.saved = [*self.saved[-3:], (blob, self.naive.copies(seqs))]
        return True

    def load(self, seq: int) -> bool:
        if not self.saved:
            return False
        blob, texts = self.saved[self.below(len(self.saved))]
        is_whole = len(texts) > 1
        site = "load-state" if self.below(4) == 0 else ""
        with fault(site, 1 + self.below(3)) if site else nullcontext():
            try:
                if self.refused(lambda: self.kv.load(blob, None if is_whole else seq), False):
                    return False
            except kvg.KVGraphError:
                assert site
                self.counts["load failed"] += 1
                return False
        loaded = NaiveStates(len(texts))
        loaded.texts = texts
        for index, text in enumerate(loaded.copies(range(len(texts)))):
            for p in sorted(text.checkpoints, reverse=True):
                text.checkpoints[p].used = self.naive.tick()
            self.naive.texts[index if is_whole else seq] = text
        self.naive.replaced = []
        return all(self.next_is_right(s) for s in range(N_SEQ)) if is_whole else self.next_is_right(seq)

    def defrag(self, seq: int) -> bool:
        self.kv.defrag("sort" if self.below(2) else "fill")
        if self.below(2):
            self.kv.update()
        return True

    def drop(self, seq: int) -> bool:
        return self.remove_range(-1 if self.below(20) == 0 else seq, 0, -1)

    def keep(self, seq: int) -> bool:
        self.kv.seq_keep(seq)
        for s in range(N_SEQ):
            if s != seq:
                self.naive.texts[s] = Text()
        return True

    def clear(self, seq: int) -> bool:
        self.kv.clear()
        self.naive = NaiveStates(N_SEQ)
        self.shared = []
        return True

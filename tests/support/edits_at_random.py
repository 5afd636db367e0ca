"""Random edits of a cache, and what each sequence's text must then be.

The judge is a fresh context that decodes the same tokens at the same positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import pykvgraph as kvg
from pykvgraph.kv_cache.hold import ResumePoint
from support import chance
from support.engines import Logits, Token, decode
from support.judge import nmse
from support.models import N_VOCAB

N_SEQ, MOST = 3, 110  # sequences, and tokens of each


class Seen(NamedTuple):
    """A token where it stands now."""

    id: int
    pos: int


@dataclass
class Text:
    """What a sequence sees, by rising position, and where it may go on at the earliest.

    sure: it can go on there. Not the copy of a part, where windows may have lost the end of that part.
    """

    tokens: list[Seen] = field(default_factory=list)
    next: int = 0
    sure: bool = True

    def copy(self) -> Text:
        return Text(list(self.tokens), self.next, self.sure)

    def where(self, keep: Callable[[int], bool]) -> Text:
        return Text([token for token in self.tokens if keep(token.pos)], self.next, self.sure)


@dataclass
class Shared:
    """A text that a hold and a resume point keep."""

    text: Text
    hold: kvg.Hold
    point: ResumePoint


Saved = tuple[bytes, list[Text]]


class Editor:
    """A context, and the text of each sequence. A call that is refused changes nothing."""

    def __init__(self, ctx: kvg.Context, fresh: kvg.Context, window: int, seed: int) -> None:
        self.ctx, self.kv, self.fresh, self.window = ctx, ctx.kv, fresh, window
        self.rng = np.random.default_rng(chance.number(seed))
        self.texts = [Text() for _ in range(N_SEQ)]
        self.shared: list[Shared] = []
        self.saved: list[Saved] = []
        self.counts: Counter[str] = Counter()
        self.worst = 0.0
        self.weights = {
            self.append: 16,
            self.append_together: 1,
            self.copy: 2,
            self.copy_a_part: 1,
            self.shift: 3,
            self.move_a_part: 3,
            self.remove: 2,
            self.go_back: 2,
            self.keep_checkpoint: 2,
            self.rewind: 2,
            self.branch: 1,
            self.share: 2,
            self.attach: 3,
            self.save: 1,
            self.load: 2,
            self.defrag: 2,
            self.drop: 4,
        }

    def step(self) -> None:
        edits = list(self.weights)
        chances = np.array(list(self.weights.values()), float)
        edit = edits[self.rng.choice(len(edits), p=chances / chances.sum())]
        seq = self.below(N_SEQ)
        self.counts[f"{edit.__name__} {'done' if edit(seq) else 'not'}"] += 1

    def below(self, n: int) -> int:
        return int(self.rng.integers(max(1, n)))

    def allowed(self, call: Callable[[], object], nothing_lost: bool = False) -> bool:
        """Whether the call did it. Its refusals: no room, and what a window has lost."""
        before = self.seen()
        try:
            call()
        except (kvg.CacheFullError, kvg.UnsupportedError) as refusal:
            self.counts[type(refusal).__name__] += 1
        except kvg.InvalidArgumentError as refusal:
            assert "lost" in str(refusal) and not nothing_lost, refusal
            self.counts["lost"] += 1
        else:
            return True
        assert before == self.seen(), self.counts
        return False

    def seen(self) -> list[list[int]]:
        """Positions of each sequence in each group."""
        views = [self.kv.cells(group) for group in range(len(self.kv.groups))]
        return [sorted(view.pos[view.seq[:, seq]].tolist()) for view in views for seq in range(N_SEQ)]

    # ---- tokens ----

    def append(self, seq: int) -> bool:
        gap = int(self.rng.choice([0] * 12 + [2, 20]))
        return self.go_on((seq,), gap) and all(self.go_on((seq,), 0) for _ in range(self.below(4)))

    def append_together(self, seq: int) -> bool:
        """Tokens that two sequences see: one becomes a copy of the other before."""
        other = (seq + 1) % N_SEQ
        return self.copy(seq) and self.go_on((seq, other), 0)

    def go_on(self, seqs: tuple[int, ...], gap: int) -> bool:
        text = self.texts[seqs[0]]
        if len(text.tokens) > MOST:
            return False
        n, pos = 1 + self.below(9), text.next + gap
        tokens = [Token(3 + self.below(N_VOCAB - 3), pos + i, seqs) for i in range(n)]
        found: list[Logits] = []
        if not self.allowed(lambda: found.append(decode(self.ctx, tokens)), text.sure):
            return False
        for seq in seqs:
            self.texts[seq].tokens += [Seen(token.id, token.pos) for token in tokens]
            self.texts[seq].next, self.texts[seq].sure = pos + n, True
        self.fresh.kv.clear()
        expected = decode(self.fresh, [Token(*token) for token in text.tokens])
        error = nmse(found[0], expected[-n:])
        self.worst = max(self.worst, error)
        assert error <= 1e-6, (error, self.counts)
        return True

    # ---- sharing ----

    def copy(self, seq: int) -> bool:
        to = (seq + 1) % N_SEQ
        self.kv.seq_rm(to, 0, -1)
        self.kv.seq_cp(seq, to, 0, -1)
        self.texts[to] = self.texts[seq].copy()
        return bool(self.texts[seq].tokens)

    def copy_a_part(self, seq: int) -> bool:
        """Windows may have lost what the copy needs where it ends: then it goes on a window later."""
        to, end = (seq + 1) % N_SEQ, self.below(self.texts[seq].next)
        self.kv.seq_rm(to, 0, -1)
        self.kv.seq_cp(seq, to, 0, end)
        text = self.texts[to] = self.texts[seq].where(lambda pos: pos < end)
        text.next, text.sure = (text.tokens[-1].pos + 1 if text.tokens else 0), not text.tokens
        if not self.go_on((to,), 0):
            text.next, text.sure = text.next + self.window - 1, True
            return self.go_on((to,), 0)
        return True

    # ---- positions ----

    def shift(self, seq: int) -> bool:
        """The beginning goes, and what follows moves down."""
        text = self.texts[seq]
        if text.next < 40:
            return False
        keep = int(self.rng.choice([0, 4, 12]))
        end = keep + 1 + self.below(text.next - keep - 3)
        if text.tokens[-1].pos < end:  # nothing is behind it, and a window may be unable to end at `keep`
            return False
        self.kv.seq_rm(seq, keep, end)
        text = self.texts[seq] = text.where(lambda pos: not keep <= pos < end)
        return self.move(seq, end, -1, keep - end)

    def move_a_part(self, seq: int) -> bool:
        """Up, where nothing is in the way; or down into a gap."""
        text = self.texts[seq]
        if len(text.tokens) < 2:
            return False
        first, last = sorted(self.rng.choice(len(text.tokens), 2, replace=False))
        below = text.tokens[first - 1].pos if first else -1
        last = len(text.tokens) - 1 if self.below(2) else last
        at_end = last == len(text.tokens) - 1
        room = 30 if at_end else text.tokens[last + 1].pos - text.tokens[last].pos - 1
        p0, p1 = text.tokens[first].pos, -1 if at_end else text.tokens[last].pos + 1
        delta = self.below(room + (p0 - below)) - (p0 - below) + 1
        return delta != 0 and self.move(seq, p0, p1, delta)

    def move(self, seq: int, p0: int, p1: int, delta: int) -> bool:
        if not self.allowed(lambda: self.kv.seq_add(seq, p0, p1, delta)):
            return False
        text = self.texts[seq]
        text.sure = text.sure and bool(text.tokens) and text.next == text.tokens[-1].pos + 1
        text.tokens = [
            Seen(token.id, token.pos + delta * (token.pos >= p0 and (p1 < 0 or token.pos < p1)))
            for token in text.tokens
        ]
        if p1 < 0:
            text.next += delta
        return True

    # ---- going back ----

    def remove(self, seq: int) -> bool:
        """A part from the middle, so that the sequence ends where it did."""
        text = self.texts[seq]
        if len(text.tokens) < 3:
            return False
        p0 = self.below(text.tokens[-1].pos)
        p1 = p0 + 1 + self.below(min(12, text.tokens[-1].pos - p0))
        self.kv.seq_rm(seq, p0, p1)
        self.texts[seq] = text.where(lambda pos: not p0 <= pos < p1)
        return True

    def go_back(self, seq: int) -> bool:
        text = self.texts[seq]
        p = max(0, text.next - 1 - self.below(15))
        if not text.tokens or p > text.tokens[-1].pos:
            return False
        if not self.allowed(lambda: self.kv.seq_rm(seq, p, -1)):
            return False
        self.end(seq, p)
        return True

    def end(self, seq: int, p: int) -> None:
        self.texts[seq] = self.texts[seq].where(lambda pos: pos < p)
        self.texts[seq].next, self.texts[seq].sure = p, True

    def keep_checkpoint(self, seq: int) -> bool:
        return bool(self.texts[seq].tokens) and self.allowed(lambda: self.kv.checkpoint(seq))

    def branch(self, seq: int) -> bool:
        """Goes on from a checkpoint, further than the window reaches, and comes back."""
        kept = self.texts[seq].next
        return (
            self.keep_checkpoint(seq)
            and all(self.go_on((seq,), self.window // 2) for _ in range(6))
            and self.rewind_to(seq, kept + self.below(self.window))
        )

    def rewind(self, seq: int) -> bool:
        text = self.texts[seq]
        kept = self.kv.checkpoints(seq)
        near = [text.next, *kept][self.below(1 + len(kept))]
        return self.rewind_to(seq, max(0, near + self.below(12) - 6))

    def rewind_to(self, seq: int, wanted: int) -> bool:
        text, kept = self.texts[seq], self.kv.checkpoints(seq)
        kept = [p for p in kept if p <= wanted]
        p = self.kv.rewind(seq, wanted)
        assert max([0, *kept]) <= p == min(p, wanted, text.next)
        self.counts["rewound to a checkpoint"] += p in kept and p < min(wanted, text.next)
        self.end(seq, p)
        return self.go_on((seq,), 0)

    # ---- what is kept elsewhere ----

    def share(self, seq: int) -> bool:
        """Of a text without gaps, as holds want it."""
        whole = [s for s, text in enumerate(self.texts) if text.next == len(text.tokens) > 0]
        if not whole or len(self.shared) > 1:
            return False
        seq = whole[self.below(len(whole))]
        text = self.texts[seq]
        made: list[ResumePoint] = []
        if not self.allowed(lambda: made.append(self.kv.resume_point(seq))):
            return False
        self.shared.append(Shared(text.copy(), self.kv.hold(seq, 0, -1), made[0]))
        return True

    def attach(self, seq: int) -> bool:
        if not self.shared:
            return False
        shared = self.shared[self.below(len(self.shared))]
        assert shared.point.p == shared.text.next
        self.kv.seq_rm(seq, 0, -1)
        self.kv.attach(shared.hold, seq)
        self.kv.attach(shared.point, seq)
        self.texts[seq] = shared.text.copy()
        if self.below(4) == 0:
            self.shared = [other for other in self.shared if other is not shared]
            shared.hold.release()
            shared.point.release()
        return True

    def save(self, seq: int) -> bool:
        whole = self.below(3) == 0
        texts = self.texts if whole else [self.texts[seq]]
        blob = self.kv.save(None if whole else seq)
        self.saved = [*self.saved[-2:], (blob, [text.copy() for text in texts])]
        return True

    def load(self, seq: int) -> bool:
        if not self.saved:
            return False
        blob, texts = self.saved[self.below(len(self.saved))]
        whole = len(texts) == N_SEQ
        if not self.allowed(lambda: self.kv.load(blob, None if whole else seq)):
            return False
        for index, text in enumerate(texts):
            self.texts[index if whole else seq] = text.copy()
        return True

    def defrag(self, seq: int) -> bool:
        self.kv.defrag("sort" if self.below(2) else "fill")
        if self.below(2):
            self.kv.update()
        return True

    def drop(self, seq: int) -> bool:
        """Room for others."""
        if self.kv.n_free > 60 and self.below(3):
            return False
        self.kv.seq_rm(seq, 0, -1)
        self.texts[seq] = Text()
        return True

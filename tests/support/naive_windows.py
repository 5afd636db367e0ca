"""A full group and a window group in plain Python: what the window loses, and what is refused for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pykvgraph import CacheFullError, InvalidArgumentError, UnsupportedError
from support.engines import Token
from support.naive_cells import MAX_POS, Cell, NaiveCells, Refusals, kept, places_of

GUARD = 10**9  # the name of a hold, for the length of a call
Move = Callable[[int], int]


@dataclass
class NaiveWindow(NaiveCells):
    """Cells of which a sequence keeps those that are no `window` positions behind its last one."""

    window: int = 0
    lost: dict[int, set[int]] = field(default_factory=dict)  # positions of each sequence

    def lost_of(self, seq: int) -> int:
        """The highest of them."""
        return max(self.lost.get(seq, ()), default=-1)

    def behind(self, seq: int) -> int:
        """The highest position that the sequence has left behind."""
        return max(-1, self.pos_max(seq) - self.window)

    def first_seen(self, pos: int) -> int:
        return max(0, pos - self.window + 1)

    def can_go_on(self, seq: int, pos: int) -> bool:
        return self.lost_of(seq) < self.first_seen(pos)

    def lose(self, seq: int, lost: int, more: Iterable[int] = ()) -> None:
        """The sequence sees nothing up to there any more; more: positions that it has lost besides."""
        gone = {cell.pos for cell in self.of(seq) if cell.pos <= lost}
        self.lost[seq] = self.lost.get(seq, set()) | gone | set(more)
        for i, cell in enumerate(self.cells):
            if cell and seq in cell.seqs and cell.pos <= lost:
                self.cells[i] = kept(replace(cell, seqs=cell.seqs - {seq}))

    @property
    def n_empty(self) -> int:
        return self.n_cells - len(self.used)

    def reusable(self, spared: int = -1) -> list[Cell]:
        """Those that nobody needs, longest ago first."""
        found = [
            (-min(self.pos_max(seq) - cell.pos for seq in cell.seqs), i, cell)
            for i, cell in enumerate(self.cells)
            if cell and not cell.holds and spared not in cell.seqs
            if all(cell.pos <= self.behind(seq) for seq in cell.seqs)
        ]
        return [cell for *_, cell in sorted(found, key=lambda each: each[:2])]

    def make_room(self, n: int, spared: int = -1) -> None:
        taken = self.reusable(spared)[: max(0, n - self.n_empty)]
        lost = {seq: max(c.pos for c in taken if seq in c.seqs) for cell in taken for seq in cell.seqs}
        for seq, pos in lost.items():
            self.lose(seq, pos)


@dataclass
class Checkpoint:
    """Held are the window's cells at positions from `first` to p - 1, by that name."""

    seq: int
    p: int
    name: int
    first: int
    used: int


class NaivePair:
    """What is done to both groups, or to none."""

    def __init__(self, n_ctx: int, n_window: int, n_seq: int, window: int) -> None:
        self.full = NaiveCells(n_ctx, n_seq)
        self.window = NaiveWindow(n_window, n_seq, window=window)
        self.n_seq = n_seq
        self.checkpoints: list[Checkpoint] = []
        self.points: dict[int, Checkpoint] = {}  # resume points, of no sequence
        self.n_names = 0

    @property
    def used(self) -> list[Cell]:
        return self.full.used

    def pos_max(self, seq: int) -> int:
        return self.full.pos_max(seq)

    def pos_min(self, seq: int) -> int:
        lowest, lost = self.window.pos_min(seq), self.window.lost_of(seq)
        return max(self.full.pos_min(seq), lost + 1 if lowest < 0 <= lost else lowest)

    def seq_rm(self, seq: int, p0: int, p1: int) -> Refusals:
        seqs = range(self.n_seq) if seq < 0 else (seq,)
        refusals = self.full.refuse(seq, p0, p1, seqs=() if seq < 0 else (seq,))
        if refusals:
            return refusals
        ending = [s for s in seqs if self._ends_before(s, p0, p1) and not self.window.can_go_on(s, p0)]
        ways = [self._way_back(s, p0) for s in ending]
        if any(way is None or way.p < p0 for way in ways):
            return (InvalidArgumentError,)
        for way in ways:
            assert way
            self._use(way)
            self._show(way, way.seq)
        self._drop(lambda c: c.seq in seqs and p0 < c.p and (p1 < 0 or c.p < p1))
        self.full.seq_rm(seq, p0, p1)
        self.window.seq_rm(seq, p0, p1)
        for s in seqs:
            left = {pos for pos in self.window.lost.get(s, ()) if pos < p0 or 0 <= p1 <= pos}
            self.window.lost[s] = left
        return ()

    def _ends_before(self, seq: int, p0: int, p1: int) -> bool:
        last = self.full.pos_max(seq)
        return (p1 < 0 or p1 > last) and 0 < p0 <= last and self.full.pos_min(seq) < p0

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> Refusals:
        refusals = self.full.seq_cp(src, dst, p0, p1)
        if not refusals:
            lost = {pos for pos in self.window.lost.get(src, ()) if p0 <= pos and (p1 < 0 or pos < p1)}
            last = max(self.window.lost_of(dst), *lost, -1)
            copied = {c.pos for _, c in self.window._in_range((src,), p0, p1) if src in c.seqs}
            self.window.lose(dst, last, lost | {pos for pos in copied if pos <= last})
            first = max(p0, self.window.lost_of(dst) + 1)
            if p1 < 0 or first < p1:
                self.window.seq_cp(src, dst, first, p1)
            if src != dst and (lost or any(src in c.seqs for _, c in self.full._in_range((src,), p0, p1))):
                self._drop(lambda c: c.seq == dst and p0 < c.p)
        return refusals

    def seq_keep(self, seq: int) -> Refusals:
        refusals = self.full.seq_keep(seq) or self.window.seq_keep(seq)
        if not refusals:
            self.window.lost = {seq: self.window.lost.get(seq, set())}
            self._drop(lambda c: c.seq != seq)
        return refusals

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> Refusals:
        refusals = self.full.refuse(p0, p1, delta, seqs=(seq,))
        return refusals or self._reposition(seq, p0, p1, lambda pos: pos + delta, False)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> Refusals:
        refusals = self.full.refuse(p0, p1, divisor, seqs=(seq,)) if divisor > 0 else (InvalidArgumentError,)
        return refusals or self._reposition(seq, p0, p1, lambda pos: pos // divisor, divisor > 1)

    def _reposition(self, seq: int, p0: int, p1: int, move: Move, divides: bool) -> Refusals:
        window = self.window

        def moved(pos: int) -> int:
            return move(pos) if p0 <= pos and (p1 < 0 or pos < p1) else pos

        def keeps(lost: set[int]) -> bool:
            last = max([-1, *(moved(c.pos) for c in window.of(seq))])
            lost_then = max((moved(pos) for pos in lost), default=-1)
            near = min(window.pos_max(seq) - max(lost, default=-1), window.window - 1)
            return lost_then < 0 or last - lost_then >= near

        def copied(cells: NaiveCells) -> list[Cell]:
            found = [
                c for _, c in cells._in_range((seq,), p0, p1) if moved(c.pos) not in (c.pos, *range(-999, 0))
            ]
            return [c for c in found if kept(cells.without(c, seq))]

        def moves_along(c: Checkpoint) -> bool:
            """With all that is before it, and nothing else; what its window needs then must be held."""
            texts = [(pos < c.p, moved(pos) < moved(c.p)) for pos in (cell.pos for cell in self.full.of(seq))]
            before = max((moved(pos) for pos in self._positions(seq) if pos < c.first), default=-1)
            stays = all(was == is_now for was, is_now in texts) and before < window.first_seen(moved(c.p))
            held = {moved(cell.pos) for cell in window.used if c.name in cell.holds}
            stays = stays and not any(0 <= pos <= before for pos in held)
            is_divided = divides and p0 < c.p and (p1 < 0 or p1 > c.p - window.window)
            return stays and 1 <= moved(c.p) <= MAX_POS and not is_divided

        if any(moved(cell.pos) > MAX_POS for cell in self.full.of(seq)):
            return (InvalidArgumentError,)
        lost = window.lost.get(seq, set())
        if not keeps(lost):
            return (UnsupportedError,)
        if len(copied(self.full)) > self.full.n_cells - len(self.full.used):
            return (CacheFullError,)
        moves = any(moved(pos) != pos for pos in (0, *range(max(p0, 0), 500)))
        unmoved = {c.name for c in self.checkpoints if moves and c.seq == seq and not moves_along(c)}
        behind = window.behind(seq)
        loses = keeps(lost | {c.pos for c in window.of(seq) if c.pos <= behind})
        while len(copied(window)) > window.n_empty:
            own = window.own_of(seq)
            n = sum(not loses or cell.pos > behind or bool(cell.holds & own) for cell in copied(window))
            if n > window.n_empty + len(window.reusable(-1 if loses else seq)):
                if not self.checkpoints:
                    return (CacheFullError,)
                if not self._drop(lambda c: c.name in unmoved):
                    self._drop_least()
                continue
            if loses:
                window.lose(seq, behind)
            window.make_room(len(copied(window)), seq)
            break
        firsts = {
            c.name: max([-1, *(moved(p) for p in self._positions(seq) if p < c.first)])
            for c in self.checkpoints
        }
        lost = {moved(pos) for pos in window.lost.get(seq, ()) if moved(pos) >= 0}
        assert not self.full._reposition(seq, p0, p1, move)
        assert not window._reposition(seq, p0, p1, move)
        self._drop(lambda c: c.name in unmoved)
        window.lost[seq] = set()
        window.lose(seq, max(lost, default=-1), lost)
        for c in self.checkpoints:
            if c.seq == seq:
                c.p, c.first = moved(c.p), firsts[c.name] + 1
        newest = {(c.seq, c.p): c.name for c in sorted(self.checkpoints, key=lambda c: c.used)}
        self._drop(lambda c: newest[c.seq, c.p] != c.name)
        return ()

    def _positions(self, seq: int) -> set[int]:
        """All that the sequence has, lost by the window or not."""
        return {cell.pos for cell in self.full.of(seq)}

    def hold(self, name: int, seq: int, p0: int, p1: int) -> Refusals:
        return self.full.hold(name, seq, p0, p1)

    def held_at(self, name: int) -> tuple[int, int] | None:
        point = self.points.get(name)
        return (point.p, point.p) if point else self.full.held_at(name)

    def attach(self, name: int, seq: int) -> Refusals:
        point, next_pos = self.points.get(name), self.full.pos_max(seq) + 1
        if point:
            refusals = self.full.refuse(seqs=(seq,)) or (
                (InvalidArgumentError,) if point.p != next_pos else ()
            )
            if not refusals:
                self._show(point, seq)
            return refusals
        refusals = self.full.attach(name, seq)
        if not refusals:
            p0, p1 = self.full.held[name]
            self.window.lose(seq, p1 - 1, range(p0, p1))
            self._drop(lambda c: c.seq == seq and c.p > next_pos)
        return refusals

    def release(self, name: int) -> Refusals:
        if name in self.points:
            self._let_go(self.points.pop(name))
            return ()
        return self.full.release(name)

    def resume_point(self, name: int, seq: int, p: int = -1) -> Refusals:
        """p < 0: where the sequence ends."""
        refusals = self._refuse_standing(seq)
        end = 0 if refusals else self.full.pos_max(seq) + 1
        p = end if p < 0 else p
        if not refusals and not (0 < p <= end and self.window.can_go_on(seq, p)):
            refusals = (InvalidArgumentError,)
        if not refusals:
            self.points[name] = self._keep(seq, p)
        return refusals

    def checkpoint(self, seq: int) -> Refusals:
        refusals = self._refuse_standing(seq)
        if not refusals:
            new = self._keep(seq, self.full.pos_max(seq) + 1)
            self.window.own[seq] = self.window.own_of(seq) | {new.name}
            self._drop(lambda c: (c.seq, c.p) == (new.seq, new.p))
            self._use(new)
            self.checkpoints.append(new)
        return refusals

    def positions(self, seq: int) -> list[int]:
        return sorted(c.p for c in self.checkpoints if c.seq == seq)

    def rewind(self, seq: int, p: int) -> int:
        """Where it leads to."""
        wanted = max(0, min(p, self.full.pos_max(seq) + 1))
        if not self.window.can_go_on(seq, wanted):
            way = self._way_back(seq, wanted)
            wanted = min(way.p, wanted) if way else 0
        assert not self.seq_rm(seq, wanted, -1)
        return wanted

    def _way_back(self, seq: int, p: int) -> Checkpoint | None:
        """The checkpoint that leads furthest, up to p."""

        def reaches(c: Checkpoint) -> int:
            before = max((pos for pos in self._positions(seq) if pos < c.first), default=-1)
            return before + self.window.window if before >= 0 else 0

        ways = [c for c in self.checkpoints if c.seq == seq and reaches(c) <= min(p, c.p)]
        return max(ways, key=lambda c: min(p, c.p), default=None)

    def _refuse_standing(self, seq: int) -> Refusals:
        refusals = self.full.refuse(seqs=(seq,))
        last = -1 if refusals else self.full.pos_max(seq)
        return () if last >= 0 and self.window.can_go_on(seq, last + 1) else (InvalidArgumentError,)

    def _keep(self, seq: int, p: int) -> Checkpoint:
        window = self.window
        first = max(window.lost_of(seq), p - 1 - window.window, -1) + 1
        self.n_names -= 1  # not those of holds
        for i, cell in enumerate(window.cells):
            if cell and seq in cell.seqs and first <= cell.pos < p:
                window.cells[i] = replace(cell, holds=cell.holds | {self.n_names})
        return Checkpoint(seq, p, self.n_names, first, 0)

    def _show(self, c: Checkpoint, seq: int) -> None:
        window = self.window
        window.lose(seq, c.first - 1)
        window.lost[seq] = {pos for pos in window.lost[seq] if pos < c.first}
        for i, cell in enumerate(window.cells):
            if cell and c.name in cell.holds:
                window.cells[i] = replace(cell, seqs=cell.seqs | {seq})

    def _use(self, c: Checkpoint) -> None:
        c.used = 1 + max([c.used, *(other.used for other in self.checkpoints)])

    def _let_go(self, c: Checkpoint) -> None:
        window = self.window
        window.cells = [kept(replace(x, holds=x.holds - {c.name})) if x else None for x in window.cells]
        window.own = {seq: own - {c.name} for seq, own in window.own.items()}

    def _drop(self, is_over: Callable[[Checkpoint], bool]) -> bool:
        """Whether any was."""
        over = [c for c in self.checkpoints if is_over(c)]
        for c in over:
            self._let_go(c)
            self.checkpoints.remove(c)
        return bool(over)

    def _drop_least(self) -> None:
        def gap(c: Checkpoint) -> int:
            others = [o.p for o in self.checkpoints if o.seq == c.seq and o.p != c.p]
            return min([c.p, *(abs(p - c.p) for p in others)])

        least = min(self.checkpoints, key=lambda c: (gap(c), c.used))
        self._drop(lambda c: c is least)

    def clear(self) -> None:
        self.full.clear()
        self.window.clear()
        self.window.lost = {}
        self.checkpoints, self.points = [], {}

    def put(self, tokens: Sequence[Token]) -> None:
        firsts = _firsts(tokens)
        ends = {seq: self.full.pos_max(seq) + 1 for seq in firsts}
        repairs = any(pos < ends[seq] for seq, pos in firsts.items())
        self.full.put(tokens)
        self._guard(firsts if repairs else {})
        self.window.make_room(len(tokens))
        self._unguard()
        self.window.put(tokens)
        places = places_of(tokens)

        def is_stale(c: Checkpoint) -> bool:
            """What it holds is of another text, or it comes behind the end of this one."""
            own = [pos for seq, pos in places if seq == c.seq]
            return any(pos < c.p and (pos >= ends[c.seq] or c.first <= pos) for pos in own)

        self._drop(is_stale)

    def _guard(self, firsts: dict[int, int]) -> None:
        """What these sequences see from these positions on is not reused."""
        for i, cell in enumerate(self.window.cells):
            if cell and any(
                seq in cell.seqs and cell.pos >= self.window.first_seen(pos) for seq, pos in firsts.items()
            ):
                self.window.cells[i] = replace(cell, holds=cell.holds | {GUARD})

    def _unguard(self) -> None:
        self.window.cells = [replace(c, holds=c.holds - {GUARD}) if c else None for c in self.window.cells]

    def check_repair(self, tokens: Sequence[Token]) -> Refusals:
        """As check_batch(); windows keep what the tokens see."""
        firsts = _firsts(tokens)
        below = {seq for seq, pos in firsts.items() if pos <= self.full.pos_max(seq)}
        for seq, pos in firsts.items():
            if not self.window.can_go_on(seq, pos):
                return (UnsupportedError,) if seq in below else (InvalidArgumentError,)
        refusals = self.full.check_repair(tokens)
        if refusals:
            return refusals
        self._guard(firsts if below else {})
        try:
            return self._make_way(len(tokens))
        finally:
            self._unguard()

    def check_batch(self, tokens: Sequence[Token], n_batch: int, n_vocab: int) -> Refusals:
        """As the full group's; when the batch is right, checkpoints give way to it."""
        refusals = self.full.check_batch(tokens, n_batch, n_vocab)
        if InvalidArgumentError in refusals:
            return refusals
        if not all(self.window.can_go_on(seq, pos) for seq, pos in _firsts(tokens).items()):
            return (InvalidArgumentError,)
        return refusals or self._make_way(len(tokens))

    def _make_way(self, n: int) -> Refusals:
        """Checkpoints give way to n tokens."""
        before = self.window.cells, self.window.own, [*self.checkpoints]
        while n > self.window.n_empty + len(self.window.reusable()):
            if not self.checkpoints:  # all of them are not enough: then none goes
                self.window.cells, self.window.own, self.checkpoints = before
                return (CacheFullError,)
            self._drop_least()
        return ()


def _firsts(tokens: Sequence[Token]) -> dict[int, int]:
    firsts: dict[int, int] = {}
    for token in tokens:
        for seq in token.seq_ids:
            firsts.setdefault(seq, token.pos)
    return firsts

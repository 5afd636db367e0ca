"""A full group and a window group in plain Python: what the window loses, and what is refused for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pykvgraph import CacheFullError, InvalidArgumentError, UnsupportedError
from support.engines import Token
from support.naive_cells import MAX_POS, Cell, NaiveCells, Refusals, is_shared, kept

Move = Callable[[int], int]


@dataclass
class NaiveWindow(NaiveCells):
    """Cells of which a sequence keeps those that are no `window` positions behind its last one."""

    window: int = 0
    lost: dict[int, int] = field(default_factory=dict)

    def lost_of(self, seq: int) -> int:
        return self.lost.get(seq, -1)

    def behind(self, seq: int) -> int:
        """The highest position that the sequence has left behind."""
        return max(-1, self.pos_max(seq) - self.window)

    def can_go_on(self, seq: int, pos: int) -> bool:
        return self.lost_of(seq) < max(0, pos - self.window + 1)

    def lose(self, seq: int, lost: int) -> None:
        """The sequence sees nothing up to there any more."""
        if lost > self.lost_of(seq):
            self.lost[seq] = lost
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


class NaivePair:
    """What is done to both groups, or to none."""

    def __init__(self, n_ctx: int, n_window: int, n_seq: int, window: int) -> None:
        self.full = NaiveCells(n_ctx, n_seq)
        self.window = NaiveWindow(n_window, n_seq, window=window)
        self.n_seq = n_seq

    def pos_min(self, seq: int) -> int:
        lowest, lost = self.window.pos_min(seq), self.window.lost_of(seq)
        return max(self.full.pos_min(seq), lost + 1 if lowest < 0 <= lost else lowest)

    def seq_rm(self, seq: int, p0: int, p1: int) -> Refusals:
        seqs = range(self.n_seq) if seq < 0 else (seq,)
        refusals = self.full.refuse(seq, p0, p1, seqs=() if seq < 0 else (seq,))
        if not refusals and any(self._ends_before_what_is_lost(s, p0, p1) for s in seqs):
            refusals = (InvalidArgumentError,)
        if not refusals:
            self.full.seq_rm(seq, p0, p1)
            self.window.seq_rm(seq, p0, p1)
            for s in seqs:
                self._tighten(s, p0, p1)
        return refusals

    def _ends_before_what_is_lost(self, seq: int, p0: int, p1: int) -> bool:
        last = self.full.pos_max(seq)
        at_the_end = (p1 < 0 or p1 > last) and 0 < p0 <= last and self.full.pos_min(seq) < p0
        return at_the_end and not self.window.can_go_on(seq, p0)

    def _tighten(self, seq: int, p0: int, p1: int) -> None:
        lost = self.window.lost_of(seq)
        if lost >= p0 - 1 or p0 < 0:
            self.window.lost[seq] = max((c.pos for c in self.full.of(seq) if c.pos <= lost), default=-1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> Refusals:
        refusals = self.full.seq_cp(src, dst, p0, p1)
        if not refusals:
            lost, end = self.window.lost_of(src), p1 if p1 >= 0 else 2**63
            if lost >= max(p0, 0):
                self.window.lose(dst, min(lost, end - 1))
            first = max(p0, self.window.lost_of(dst) + 1)
            if p1 < 0 or first < p1:
                self.window.seq_cp(src, dst, first, p1)
        return refusals

    def seq_keep(self, seq: int) -> Refusals:
        refusals = self.full.seq_keep(seq) or self.window.seq_keep(seq)
        if not refusals:
            self.window.lost = {seq: self.window.lost_of(seq)}
        return refusals

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> Refusals:
        refusals = self.full.refuse(p0, p1, delta, seqs=(seq,))
        return refusals or self._reposition(seq, p0, p1, lambda pos: pos + delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> Refusals:
        refusals = self.full.refuse(p0, p1, d, seqs=(seq,)) if d > 0 else (InvalidArgumentError,)
        return refusals or self._reposition(seq, p0, p1, lambda pos: pos // d)

    def _reposition(self, seq: int, p0: int, p1: int, move: Move) -> Refusals:
        window = self.window

        def moved(pos: int) -> int:
            return move(pos) if p0 <= pos and (p1 < 0 or pos < p1) else pos

        def lost_then(lost: int) -> int:
            return max((moved(c.pos) for c in self.full.of(seq) if c.pos <= lost), default=-1)

        def keeps(lost: int) -> bool:
            last = max([-1, *(moved(c.pos) for c in window.of(seq))])
            near = min(window.pos_max(seq) - lost, window.window - 1)
            return lost_then(lost) < 0 or last - lost_then(lost) >= near

        def copied(cells: NaiveCells) -> list[Cell]:
            return [c for c in cells.of(seq) if is_shared(c) and moved(c.pos) not in (c.pos, *range(-999, 0))]

        if any(moved(cell.pos) > MAX_POS for cell in self.full.of(seq)):
            return (InvalidArgumentError,)
        if len(copied(self.full)) > self.full.n_cells - len(self.full.used):
            return (CacheFullError,)
        if not keeps(window.lost_of(seq)):
            return (UnsupportedError,)
        behind = window.behind(seq)
        if len(copied(window)) > window.n_empty:
            loses = keeps(max(window.lost_of(seq), behind))
            n = sum(not loses or cell.pos > behind for cell in copied(window))
            if n > window.n_empty + len(window.reusable(-1 if loses else seq)):
                return (CacheFullError,)
            if loses:
                window.lose(seq, behind)
            window.make_room(len(copied(window)), seq)
        lost = lost_then(window.lost_of(seq))
        assert not self.full._reposition(seq, p0, p1, move)
        assert not window._reposition(seq, p0, p1, move)
        window.lost[seq] = -1
        window.lose(seq, lost)
        return ()

    def hold(self, name: int, seq: int, p0: int, p1: int) -> Refusals:
        return self.full.hold(name, seq, p0, p1)

    def attach(self, name: int, seq: int) -> Refusals:
        refusals = self.full.attach(name, seq)
        if not refusals:
            self.window.lose(seq, self.full.pos_max(seq))
        return refusals

    def release(self, name: int) -> Refusals:
        return self.full.release(name)

    def clear(self) -> None:
        self.full.clear()
        self.window.clear()
        self.window.lost = {}

    def put(self, tokens: Sequence[Token]) -> None:
        self.full.put(tokens)
        self.window.make_room(len(tokens))
        self.window.put(tokens)

    def check_batch(self, tokens: Sequence[Token], n_batch: int, n_vocab: int) -> Refusals:
        refusals = self.full.check_batch(tokens, n_batch, n_vocab)
        if InvalidArgumentError in refusals:
            return refusals
        firsts: dict[int, int] = {}
        for token in tokens:
            for seq in token.seq_ids:
                firsts.setdefault(seq, token.pos)
        if not all(self.window.can_go_on(seq, pos) for seq, pos in firsts.items()):
            return (InvalidArgumentError,)
        if len(tokens) > self.window.n_empty + len(self.window.reusable()):
            return (CacheFullError,)
        return refusals

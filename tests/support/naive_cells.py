"""The cells as docs tell of them, in plain Python: slow, obvious, any integer welcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from pykvgraph import CacheFullError, InvalidArgumentError
from support.engines import Token

INT64 = range(-(2**63), 2**63)
MAX_POS = 2**31 - 1

# What a call must raise: one of these. Empty: it must not raise.
Refusals = tuple[type[Exception], ...]


@dataclass(frozen=True)
class Cell:
    """One token's place. `rotations` counts the updates that have rotated its K, which carries a `dither`."""

    token: int
    pos: int
    seqs: frozenset[int]
    shift: int = 0
    rotations: int = 0
    dither: int = 0
    top: int = 0  # the highest position that it has had
    holds: frozenset[int] = frozenset()


@dataclass
class NaiveCells:
    """A list of cells, None where empty. An op returns what the real one must raise; it did nothing then.

    Where there is a choice, it is made as ours makes it: of two runs of empty cells equally long the first.
    """

    n_cells: int
    n_seq_max: int
    cells: list[Cell | None] = field(default_factory=list)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # holds: positions [p0, p1)
    own: dict[int, frozenset[int]] = field(default_factory=dict)  # of sequences: holds that move with them

    def __post_init__(self) -> None:
        self.cells = self.cells or [None] * self.n_cells

    @property
    def used(self) -> list[Cell]:
        return [cell for cell in self.cells if cell]

    @property
    def n_kv(self) -> int:
        return max((i + 1 for i, cell in enumerate(self.cells) if cell), default=0)

    def slots(self, n: int) -> list[int]:
        """n empty cells, the longest runs of them first."""
        runs = [
            list(run) for empty, run in groupby(range(self.n_cells), lambda i: self.cells[i] is None) if empty
        ]
        return [i for run in sorted(runs, key=len, reverse=True) for i in run][:n]

    def of(self, seq: int) -> list[Cell]:
        return [cell for cell in self.used if seq in cell.seqs]

    def pos_max(self, seq: int) -> int:
        return max((cell.pos for cell in self.of(seq)), default=-1)

    def pos_min(self, seq: int) -> int:
        return min((cell.pos for cell in self.of(seq)), default=-1)

    def refuse(self, *numbers: int, seqs: Sequence[int] = ()) -> Refusals:
        """Numbers beyond int64, and sequences that aren't."""
        wide = any(number not in INT64 for number in (*numbers, *seqs))
        return (InvalidArgumentError,) if wide or any(not 0 <= seq < self.n_seq_max for seq in seqs) else ()

    def seq_rm(self, seq: int, p0: int, p1: int) -> Refusals:
        every = seq < 0
        refusals = self.refuse(seq, p0, p1, seqs=() if every else (seq,))
        if not refusals:
            for s in range(self.n_seq_max) if every else (seq,):
                for i, cell in self._in_range((s,), p0, p1):
                    self.cells[i] = kept(self.without(cell, s))
        return refusals

    def hold(self, name: int, seq: int, p0: int, p1: int) -> Refusals:
        refusals = self.refuse(p0, p1, seqs=(seq,))
        p0, p1 = max(p0, 0), p1 if p1 >= 0 else self.pos_max(seq) + 1
        positions = {cell.pos for cell in self.of(seq)} if not refusals else set()
        if refusals or p1 <= p0 or not positions.issuperset(range(p0, p1)):
            return (InvalidArgumentError,)
        for i, cell in self._in_range((seq,), p0, p1):
            self.cells[i] = replace(cell, holds=cell.holds | {name})
        self.held[name] = p0, p1
        return ()

    def held_at(self, name: int) -> tuple[int, int] | None:
        """Of a hold that was not released."""
        return self.held.get(name)

    def attach(self, name: int, seq: int) -> Refusals:
        if self.refuse(seqs=(seq,)) or name not in self.held or self.held[name][0] != self.pos_max(seq) + 1:
            return (InvalidArgumentError,)
        self.cells = [replace(c, seqs=c.seqs | {seq}) if c and name in c.holds else c for c in self.cells]
        return ()

    def release(self, name: int) -> Refusals:
        if name not in self.held:
            return (InvalidArgumentError,)
        del self.held[name]
        self.cells = [kept(replace(c, holds=c.holds - {name})) if c else None for c in self.cells]
        return ()

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> Refusals:
        refusals = self.refuse(p0, p1, seqs=(src, dst))
        if not refusals:
            for i, cell in self._in_range((src,), p0, p1):
                if src in cell.seqs:
                    self.cells[i] = replace(cell, seqs=cell.seqs | {dst})
        return refusals

    def seq_keep(self, seq: int) -> Refusals:
        refusals = self.refuse(seqs=(seq,))
        if not refusals:
            only = frozenset({seq})
            self.cells = [kept(replace(c, seqs=c.seqs & only)) if c else None for c in self.cells]
        return refusals

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> Refusals:
        refusals = self.refuse(p0, p1, delta, seqs=(seq,))
        return refusals or self._reposition(seq, p0, p1, lambda pos: pos + delta)

    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> Refusals:
        refusals = self.refuse(p0, p1, divisor, seqs=(seq,)) if divisor > 0 else (InvalidArgumentError,)
        return refusals or self._reposition(seq, p0, p1, lambda pos: pos // divisor)

    def _reposition(self, seq: int, p0: int, p1: int, move: Callable[[int], int]) -> Refusals:
        found = [(i, cell, move(cell.pos)) for i, cell in self._in_range((seq,), p0, p1)]
        if any(pos > MAX_POS for _, _, pos in found):
            return (InvalidArgumentError,)
        copied = [
            i for i, cell, pos in found if pos >= 0 and pos != cell.pos and kept(self.without(cell, seq))
        ]
        if len(copied) > self.n_cells - len(self.used):
            return (CacheFullError,)
        copies = dict(zip(copied, self.slots(len(copied)), strict=True))
        for i, cell, pos in found:
            if pos < 0 or i in copies:
                self.cells[i] = kept(self.without(cell, seq))
            if pos >= 0 and pos != cell.pos:
                shift = cell.shift + pos - cell.pos
                self.cells[copies.get(i, i)] = replace(
                    cell,
                    seqs=cell.seqs & {seq},
                    pos=pos,
                    shift=shift,
                    top=max(pos, cell.top),
                    holds=cell.holds & self.own_of(seq),
                )
        return ()

    def own_of(self, seq: int) -> frozenset[int]:
        return self.own.get(seq, frozenset())

    def without(self, cell: Cell, seq: int) -> Cell:
        """The cell as it is when neither the sequence nor a hold of its own needs it."""
        return replace(cell, seqs=cell.seqs - {seq}, holds=cell.holds - self.own_of(seq))

    def clear(self) -> None:
        self.cells = [None] * self.n_cells
        self.held = {}
        self.own = {}

    def rotate(self) -> int:
        """The K-shift; the number of cells that it rotates."""
        waiting = [i for i, cell in enumerate(self.cells) if cell and cell.shift]
        carried = Counter(cell.dither for cell in self.cells if cell and cell.shift and cell.dither > 1)
        most = min((dither for dither, n in carried.items() if n == max(carried.values())), default=255)
        others = [2 + (most - 1 + i) % 254 for i in range(254)]  # from the one after it on
        again = next((dither for dither in others if dither not in carried), others[0])
        for i in waiting:
            cell = self.cells[i]
            assert cell
            dither = again if cell.rotations else 1
            self.cells[i] = replace(cell, shift=0, rotations=cell.rotations + 1, dither=dither)
        return len(waiting)

    def fill(self) -> int:
        """Used cells at or beyond n_used go to the holes before it, in order; how many had to."""
        n_used = len(self.used)
        tail = [cell for cell in self.cells[n_used:] if cell]
        rest = iter(tail)
        self.cells[:n_used] = [cell or next(rest) for cell in self.cells[:n_used]]
        self.cells[n_used:] = [None] * (self.n_cells - n_used)
        return len(tail)

    def sort(self) -> int:
        """Larger sets first, then lower ids, then positions; how many cells changed places.

        Cells that no sequence sees stay in their order.
        """
        order = sorted(
            self.used,
            key=lambda cell: (-len(cell.seqs), sorted(cell.seqs), cell.pos if cell.seqs else 0),
        )
        n_moved = sum(self.cells[i] is not cell for i, cell in enumerate(order))
        self.cells = [*order, *[None] * (self.n_cells - len(order))]
        return n_moved

    def put(self, tokens: Sequence[Token]) -> None:
        """What decode leaves behind; nothing of what the same sequences had at these positions."""
        slots, places = self.slots(len(tokens)), places_of(tokens)
        for i, cell in enumerate(self.cells):
            if cell:
                gone = {seq for seq in cell.seqs if (seq, cell.pos) in places}
                self.cells[i] = kept(replace(cell, seqs=cell.seqs - gone))
        for i, token in zip(slots, tokens, strict=True):
            self.cells[i] = Cell(token.id, token.pos, frozenset(token.seq_ids), top=token.pos)

    def check_repair(self, tokens: Sequence[Token]) -> Refusals:
        """What decode(repair=True) must raise; sequences, positions and tokens are valid each by itself."""
        places, seqs = places_of(tokens), range(self.n_seq_max)
        taken = Counter((seq, cell.pos) for cell in self.used for seq in cell.seqs)
        if any(taken[place] > 1 for place in places):
            return (InvalidArgumentError,)
        seen = {  # what stays, by position
            seq: {
                i: cell.pos
                for i, cell in enumerate(self.cells)
                if cell and seq in cell.seqs and (seq, cell.pos) not in places
            }
            for seq in seqs
        }
        last = dict.fromkeys(seqs, -1)
        for n, token in enumerate(tokens):
            sights = [{i for i, pos in seen[seq].items() if pos < token.pos} for seq in token.seq_ids]
            rises = all(token.pos > last[seq] for seq in token.seq_ids)
            if not rises or any(sight != sights[0] for sight in sights):
                return (InvalidArgumentError,)
            for seq in token.seq_ids:
                last[seq] = token.pos
                seen[seq][self.n_cells + n] = token.pos  # a cell to be
        return (CacheFullError,) if len(tokens) > self.n_cells - len(self.used) else ()

    def check_batch(self, tokens: Sequence[Token], n_batch: int, n_vocab: int) -> Refusals:
        """What decode must raise for this batch. A full cache is told apart only in a batch that is valid."""
        if not 1 <= len(tokens) <= n_batch:
            return (InvalidArgumentError,)
        seqs = range(self.n_seq_max)
        seen = {seq: {i for i, cell in enumerate(self.cells) if cell and seq in cell.seqs} for seq in seqs}
        last = {seq: self.pos_max(seq) for seq in seqs}
        for i, token in enumerate(tokens):
            wrong = not token.seq_ids or any(not 0 <= seq < self.n_seq_max for seq in token.seq_ids)
            if wrong or not 0 <= token.id < n_vocab or not 0 <= token.pos <= MAX_POS:
                return (InvalidArgumentError,)
            if any(token.pos <= last[seq] or seen[seq] != seen[token.seq_ids[0]] for seq in token.seq_ids):
                return (InvalidArgumentError,)
            for seq in token.seq_ids:
                last[seq] = token.pos
                seen[seq].add(self.n_cells + i)  # a cell to be
        return (CacheFullError,) if len(tokens) > self.n_cells - len(self.used) else ()

    def _in_range(self, seqs: Sequence[int], p0: int, p1: int) -> list[tuple[int, Cell]]:
        own = frozenset().union(*(self.own_of(seq) for seq in seqs))
        used = [(i, cell) for i, cell in enumerate(self.cells) if cell]
        seen = [(i, cell) for i, cell in used if not cell.seqs.isdisjoint(seqs) or cell.holds & own]
        return [(i, cell) for i, cell in seen if p0 <= cell.pos and (p1 < 0 or cell.pos < p1)]


def places_of(tokens: Sequence[Token]) -> set[tuple[int, int]]:
    """Sequences and positions."""
    return {(seq, token.pos) for token in tokens for seq in token.seq_ids}


def kept(cell: Cell) -> Cell | None:
    """The cell while a sequence sees it or a hold keeps it."""
    return cell if cell.seqs or cell.holds else None

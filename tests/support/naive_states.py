"""What sequences of a model with recurrent layers have, in plain Python: cells, states and checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Seen(NamedTuple):
    """A token where it stands now."""

    id: int
    pos: int


@dataclass(eq=False)
class Row:
    """A state, and the ids that it has read."""

    read: tuple[int, ...]


@dataclass
class Checkpoint:
    row: Row
    used: int


@dataclass
class Text:
    """What a sequence sees, by rising position, and its state; None: zeros, or nobody knows it."""

    cells: list[Seen] = field(default_factory=list)
    row: Row | None = None
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)

    @property
    def next(self) -> int:
        return self.cells[-1].pos + 1 if self.cells else 0

    @property
    def is_lost(self) -> bool:
        """Whether nobody knows the state that its next token needs."""
        return bool(self.cells) and self.row is None


class Range(NamedTuple):
    """p0 <= position < p1, which moves by delta after a division."""

    p0: int
    p1: int
    delta: int = 0
    d: int = 1

    @classmethod
    def of(cls, p0: int, p1: int, delta: int = 0, d: int = 1) -> Range:
        return cls(max(p0, 0), 2**40 if p1 < 0 else p1, delta, d)

    def has(self, pos: int) -> bool:
        return self.p0 <= pos < self.p1

    def after(self, pos: int) -> int:
        return pos // self.d + self.delta if self.has(pos) else pos


class NaiveStates:
    """The texts of all sequences. A method that returns False says that the call must be refused."""

    def __init__(self, n_seq: int) -> None:
        self.texts = [Text() for _ in range(n_seq)]
        self.points: list[Row] = []  # of resume points
        self.replaced: list[Row] = []  # by the last step
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def users(self) -> Counter[tuple[frozenset[int], int]]:
        """For every row that anybody has, the sequences whose live state it is and how often it is kept."""
        live: dict[Row, set[int]] = {}
        kept: Counter[Row] = Counter(self.points)
        for seq, text in enumerate(self.texts):
            if text.row is not None:
                live.setdefault(text.row, set()).add(seq)
            kept.update(each.row for each in text.checkpoints.values())
        return Counter((frozenset(live.get(row, ())), kept[row]) for row in {*live, *kept})

    def n_replaced(self) -> int:
        """Rows that only the last step's undoing needs."""
        had = {*self.points, *(text.row for text in self.texts)}
        had |= {each.row for text in self.texts for each in text.checkpoints.values()}
        return len({*self.replaced} - had)

    def append(self, tokens: Iterable[tuple[int, int, tuple[int, ...]]]) -> None:
        """A step: ids, positions and sequences of its tokens."""
        tokens = list(tokens)
        last = {seq: seqs for _, _, seqs in tokens for seq in seqs}
        self.replaced = [row for seq in last if (row := self.texts[seq].row) is not None]
        for seq in last:
            text = self.texts[seq]
            mine = [Seen(token, pos) for token, pos, seqs in tokens if seq in seqs]
            self.drop_within(seq, Range.of(mine[0].pos, -1))
            text.cells += mine
        rows: dict[tuple[int, ...], Row] = {}  # sequences that end with the same token have the same state
        for seq, seqs in last.items():
            text = self.texts[seq]
            before = text.row.read if text.row else ()
            read = (*before, *(token for token, _, others in tokens if seq in others))
            rows.setdefault(seqs, Row(read))
        for seq, seqs in last.items():
            self.texts[seq].row = rows[seqs]

    def drop_within(self, seq: int, where: Range) -> None:
        text = self.texts[seq]
        text.checkpoints = {p: c for p, c in text.checkpoints.items() if not where.p0 < p < where.p1}

    def can_remove(self, seq: int, where: Range) -> bool:
        text = self.texts[seq]
        return not self.loses_its_end(text, where) or where.p0 in text.checkpoints

    def loses_its_end(self, text: Text, where: Range) -> bool:
        left = any(token.pos < where.p0 for token in text.cells)
        return left and where.p0 < text.next <= where.p1

    def remove(self, seq: int, where: Range) -> None:
        text = self.texts[seq]
        if self.loses_its_end(text, where):
            text.checkpoints[where.p0].used = self.tick()
            text.row = text.checkpoints[where.p0].row
        self.drop_within(seq, where)
        text.cells = [token for token in text.cells if not where.has(token.pos)]
        self.settle(seq)

    def settle(self, seq: int) -> None:
        text = self.texts[seq]
        text.cells.sort(key=lambda token: token.pos)
        if not text.cells:  # nothing is left of which a checkpoint could be the beginning
            text.row = None
            text.checkpoints.clear()

    def rewind(self, seq: int, p: int) -> int:
        text = self.texts[seq]
        there = min(max(p, 0), text.next)
        if there > 0 and (there < text.next or text.is_lost):
            there = max((c for c in text.checkpoints if c <= there), default=0)
        self.remove(seq, Range.of(there, -1))
        return there

    def can_move(self, seq: int, change: Range) -> bool:
        """A sequence may lose its last tokens with all the others only."""
        text = self.texts[seq]
        return not text.cells or change.after(text.next - 1) >= 0 or text.cells[0].pos >= change.p0

    def move(self, seq: int, change: Range) -> None:
        text = self.texts[seq]
        moved: dict[int, Checkpoint] = {}
        for p, each in text.checkpoints.items():
            to = change.after(p)
            changes_sides = any((pos < p) != (change.after(pos) < to) for _, pos in text.cells)
            is_divided = change.d > 1 and change.p0 < p and change.p1 > p
            stays = to >= 1 and not changes_sides and not is_divided
            if stays and (to not in moved or moved[to].used < each.used):
                moved[to] = each
        text.checkpoints = moved
        text.cells = [Seen(token, to) for token, pos in text.cells if (to := change.after(pos)) >= 0]
        self.settle(seq)

    def copies_all(self, src: int, where: Range) -> bool:
        text = self.texts[src]
        return where.p0 <= text.cells[0].pos and where.p1 > text.next - 1

    def can_copy(self, src: int, dst: int, where: Range) -> bool:
        text = self.texts[src]
        if src == dst or not any(where.has(token.pos) for token in text.cells):
            return True
        part = where.p0 <= text.cells[0].pos and where.p1 in text.checkpoints
        return not self.texts[dst].cells and (self.copies_all(src, where) or part)

    def copy(self, src: int, dst: int, where: Range) -> None:
        if src == dst:
            return
        text, to = self.texts[src], self.texts[dst]
        cells = [token for token in text.cells if where.has(token.pos)]
        if cells:
            self.drop_within(dst, Range.of(where.p0, -1))
            to.cells = cells
            to.row = text.row if self.copies_all(src, where) else text.checkpoints[where.p1].row

    def copies(self, seqs: Iterable[int]) -> list[Text]:
        """Of sequences as they stand, with rows of their own that are shared as the old ones are."""
        rows: dict[Row, Row] = {}

        def other(row: Row) -> Row:
            return rows.setdefault(row, Row(row.read))

        return [
            Text(
                list(text.cells),
                other(text.row) if text.row else None,
                {p: Checkpoint(other(each.row), each.used) for p, each in text.checkpoints.items()},
            )
            for text in (self.texts[seq] for seq in seqs)
        ]

"""A map of the whole cache at one moment: every group of cells, recurrent states, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pykvgraph.checks import integer
from pykvgraph.kv_cache.maps.group import MIN_WIDTH, checkpoint_lines, group_lines, name, seen_by, state_lines
from pykvgraph.kv_cache.maps.lines import GAP, Line, Segment, as_html, as_text, beside
from pykvgraph.types import CellGroup, CellsView


@dataclass(frozen=True, repr=False)
class CellMap:
    """A picture of the cache, `kv.cell_map()`: a notebook shows it in colours, str() is text.

    `.` is an empty cell, a letter a cell that one sequence sees (a: sequence 0), `*` a cell that several
    sequences see, `+` a cell that only a hold or a checkpoint keeps. Under a row, `<` or `>` marks a cell
    whose K-shift to a lower or higher position is pending, `~` one whose K-shift is waiting (KVCache.update),
    and `^` the span that the next token of sequence `seq` attends over. Groups of cells are side by side.

    groups, views: of each group of cells. states: rows of recurrent states; None: no layer has one.
    checkpoints: positions, of each sequence. seq: whose span is marked, or None.
    """

    groups: tuple[CellGroup, ...]
    views: tuple[CellsView, ...]
    states: CellsView | None = None
    checkpoints: Sequence[Sequence[int]] = ()
    seq: int | None = None

    @property
    def titles(self) -> list[str]:
        """A name for each group of cells; "" for the only one."""
        if len(self.groups) < 2:
            return [""] * len(self.groups)
        return ["full" if group.window == 0 else f"window of {group.window}" for group in self.groups]

    def text(self, *, width: int = 80, color: bool = False) -> str:
        """Counts and rows of cells of each group, in at most `width` columns; then who has what.

        There is no newline at the end. color: use ANSI escapes. Raises InvalidArgumentError for a width
        below 20.
        """
        return as_text(self._lines(integer(width, "width", MIN_WIDTH)), color=color)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._lines(100))

    def _lines(self, width: int) -> list[Line]:
        lines = self._group_lines(width) + self._sequence_lines()
        if self.states is not None:
            lines += state_lines(self.states, width)
        return lines + checkpoint_lines(self.checkpoints)

    def _group_lines(self, width: int) -> list[Line]:
        """The groups side by side if they find room, else one below the other."""
        n = len(self.views)
        column = (width - GAP * (n - 1)) // n
        together = beside(self._blocks(column), width) if column >= MIN_WIDTH else None
        return together or [line for block in self._blocks(width) for line in block]

    def _blocks(self, width: int) -> list[list[Line]]:
        return [
            [*([[Segment(title)]] if title else []), *group_lines(view, self.seq, width)]
            for title, view in zip(self.titles, self.views, strict=True)
        ]

    def _sequence_lines(self) -> list[Line]:
        """For each sequence a line for each group where it has cells."""
        lines: list[Line] = []
        for seq in range(self.views[0].seq.shape[1]):
            span = "; ^ its span" if seq == self.seq else ""
            for title, view in zip(self.titles, self.views, strict=True):
                if view.seq[:, seq].any():
                    where = f", {title}" if title else ""
                    lines.append([name(seq), Segment(f" sequence {seq}{where}: {seen_by(view, seq)}{span}")])
        return lines


def map_of(view: CellsView, seq: int | None = None) -> CellMap:
    """The map of one group of cells alone."""
    n_cells = len(view.pos)
    group = CellGroup("full", (), n_cells, 0, view.n_used, view.n_kv, 0)
    return CellMap((group,), (view,), seq=seq)

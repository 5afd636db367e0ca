"""The cells of a cache as text, one character per cell."""

from __future__ import annotations

import string
from collections.abc import Sequence

import click
import numpy as np

from pykvgraph.checks import integer
from pykvgraph.kv_cache import KVCache
from pykvgraph.types import CellsView

EMPTY, SHARED, OTHER, HELD = ".", "*", "#", "+"
SHIFTS = {-1: "<", 0: " ", 1: ">"}
LETTERS = string.ascii_lowercase + string.ascii_uppercase
COLORS = (
    "blue",
    "green",
    "yellow",
    "magenta",
    "cyan",
    "bright_blue",
    "bright_green",
    "bright_yellow",
    "bright_magenta",
    "bright_cyan",
)
SHARED_COLOR = "red"
BLOCK = 8  # a row has a multiple of so many cells, if the width allows it


def letter(seq: int) -> str:
    """The character of a sequence: a-z, A-Z, and # for all others."""
    return LETTERS[seq] if seq < len(LETTERS) else OTHER


def color_of(seq: int) -> str:
    """The name of a sequence's colour in click."""
    return COLORS[seq % len(COLORS)]


def attended_span(cells: CellsView, seq: int) -> range:
    """From the lowest to the highest cell that the sequence sees: its next token attends over these cells."""
    seen = np.flatnonzero(cells.seq[:, seq])
    return range(int(seen[0]), int(seen[-1]) + 1) if len(seen) else range(0)


def cell_map(
    cells: KVCache | CellsView, *, seq: int | None = None, width: int = 80, color: bool = False
) -> str:
    """Draws the cells as lines of at most `width` columns, without a newline at the end.

    First comes a header with counts, then rows of cells. A row begins with the index of its first cell. `.`
    is an empty cell, a letter a cell that one sequence sees (a: sequence 0), `*` a cell that several
    sequences see, `+` a cell that only a hold keeps. Under a row, `<` or `>` marks a cell whose K-shift to
    a lower or higher position is pending, and `^` marks the span that the next token of sequence `seq`
    attends over. Last, a line for each sequence with its positions. color: use ANSI escapes.

    Raises InvalidArgumentError for a width below 20, or an id of a sequence that is out of range.
    """
    view = cells.cells() if isinstance(cells, KVCache) else cells
    integer(width, "width", 20)
    n_cells, n_seq_max = view.seq.shape
    span = range(0) if seq is None else attended_span(view, integer(seq, "seq", 0, n_seq_max - 1))
    margin = len(str(max(n_cells - 1, 0))) + 1
    per_row = width - margin
    per_row -= per_row % BLOCK if per_row >= BLOCK else 0
    lines = [header(view)]
    for begin in range(0, n_cells, per_row):
        row = range(begin, min(begin + per_row, n_cells))
        symbols = "".join(_symbol(view, cell, color) for cell in row)
        lines.append(f"{begin:>{margin - 1}} {symbols}")
        shifts = "".join(SHIFTS[int(np.sign(view.shift[cell]))] for cell in row)
        spans = "".join("^" if cell in span else " " for cell in row)
        lines += [" " * margin + marks.rstrip() for marks in (shifts, spans) if marks.strip()]
    lines += [_sequence_line(view, index, color) for index in range(n_seq_max) if view.seq[:, index].any()]
    return "\n".join(lines)


def state_map(states: CellsView, *, width: int = 80, color: bool = False) -> str:
    """Draws the rows of recurrent states (the last of `kv.groups`), in lines of at most `width` columns.

    First a header with counts, then the rows, with the characters of cell_map(). `+` is a state that only
    checkpoints and resume points keep.
    """
    integer(width, "width", 20)
    n_rows = len(states.pos)
    symbols = [_symbol(states, row, color) for row in range(n_rows)]
    lines = [f"{n_rows} states: {int(np.sum(states.pos >= 0))} used"]
    lines += ["  " + "".join(symbols[begin : begin + width - 2]) for begin in range(0, n_rows, width - 2)]
    return "\n".join(lines)


def checkpoint_lines(checkpoints: Sequence[Sequence[int]], *, color: bool = False) -> list[str]:
    """For each sequence that has any, a line with their positions. checkpoints: of each sequence."""
    return [
        f"{_name(seq, color)} checkpoints of sequence {seq}: {', '.join(map(str, positions))}"
        for seq, positions in enumerate(checkpoints)
        if positions
    ]


def header(view: CellsView) -> str:
    """Counts: all cells, used cells, n_kv (the highest used cell + 1), and holes (empty cells below n_kv)."""
    used = np.flatnonzero(view.pos >= 0)
    n_kv = int(used[-1]) + 1 if len(used) else 0
    return f"{len(view.pos)} cells: {len(used)} used, n_kv {n_kv}, {n_kv - len(used)} holes"


def legend() -> str:
    """The meanings of the characters of a map."""
    return (
        f"{EMPTY} empty  a-z A-Z one sequence's  {SHARED} shared by several  {HELD} only held\n"
        "< > K-shift pending, to a lower or higher position  ^ the attended span"
    )


def _symbol(view: CellsView, cell: int, color: bool) -> str:
    seqs = np.flatnonzero(view.seq[cell])
    if len(seqs) == 0:
        return HELD if view.held[cell] else EMPTY
    if len(seqs) > 1:
        return click.style(SHARED, fg=SHARED_COLOR, bold=True) if color else SHARED
    return _name(int(seqs[0]), color)


def _name(seq: int, color: bool) -> str:
    return click.style(letter(seq), fg=color_of(seq)) if color else letter(seq)


def _sequence_line(view: CellsView, seq: int, color: bool) -> str:
    seen = view.seq[:, seq]
    positions = view.pos[seen]
    n_shared = int(np.sum(view.seq[seen].sum(axis=1) > 1))
    name = _name(seq, color)
    shared = f", {n_shared} of them shared" if n_shared else ""
    span = f"{positions.min()}-{positions.max()}"
    return f"{name} sequence {seq}: {len(positions)} cells, positions {span}{shared}"

"""The cells of one group as lines, one character per cell."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np

from pykvgraph.checks import integer
from pykvgraph.kv_cache.maps.colors import HELD_COLOR, SHARED_COLOR, color_of
from pykvgraph.kv_cache.maps.lines import Line, Segment, merged
from pykvgraph.types import CellsView

EMPTY, SHARED, OTHER, HELD, WAITING = ".", "*", "#", "+", "~"
SHIFTS = {-1: "<", 0: " ", 1: ">"}
LETTERS = string.ascii_lowercase + string.ascii_uppercase
BLOCK = 8  # a row has a multiple of so many cells, if the width allows it
MIN_WIDTH = 20


def letter(seq: int) -> str:
    """The character of a sequence: a-z, A-Z, and # for all others."""
    return LETTERS[seq] if seq < len(LETTERS) else OTHER


def attended_span(cells: CellsView, seq: int) -> range:
    """From the lowest to the highest cell that the sequence sees: its next token attends over these cells."""
    seen = np.flatnonzero(cells.seq[:, seq])
    return range(int(seen[0]), int(seen[-1]) + 1) if len(seen) else range(0)


def group_lines(view: CellsView, seq: int | None, width: int) -> list[Line]:
    """A header with counts, then rows of cells, each with what is to be marked under it.

    A row begins with the index of its first cell. seq: whose attended span is marked, or None.
    """
    n_cells, n_seq_max = view.seq.shape
    span = range(0) if seq is None else attended_span(view, integer(seq, "seq", 0, n_seq_max - 1))
    margin = len(str(max(n_cells - 1, 0))) + 1
    per_row = max(width - margin, 1)
    per_row -= per_row % BLOCK if per_row >= BLOCK else 0
    lines = [[Segment(header(view))]]
    for begin in range(0, n_cells, per_row):
        row = range(begin, min(begin + per_row, n_cells))
        symbols = [_symbol(view, cell) for cell in row]
        lines.append([Segment(f"{begin:>{margin - 1}} "), *merged(symbols)])
        waiting = view.waiting[row.start : row.stop]
        signs = np.sign(view.shift[row.start : row.stop])
        shifts = "".join(
            WAITING if waits else SHIFTS[int(sign)] for waits, sign in zip(waiting, signs, strict=True)
        )
        spans = "".join("^" if cell in span else " " for cell in row)
        lines += [[Segment(" " * margin + marks.rstrip())] for marks in (shifts, spans) if marks.strip()]
    return lines


def state_lines(states: CellsView, width: int) -> list[Line]:
    """The rows of recurrent states (the last of `kv.groups`): a header with counts, then the rows.

    `+` is a state that only checkpoints and resume points keep.
    """
    n_rows = len(states.pos)
    symbols = [_symbol(states, row) for row in range(n_rows)]
    lines = [[Segment(f"{n_rows} states: {states.n_used} used")]]
    for begin in range(0, n_rows, width - 2):
        lines.append([Segment("  "), *merged(symbols[begin : begin + width - 2])])
    return lines


def checkpoint_lines(checkpoints: Sequence[Sequence[int]]) -> list[Line]:
    """For each sequence that has any, a line with their positions. checkpoints: of each sequence."""
    return [
        [name(seq), Segment(f" checkpoints of sequence {seq}: {', '.join(map(str, positions))}")]
        for seq, positions in enumerate(checkpoints)
        if positions
    ]


def header(view: CellsView) -> str:
    """Counts: all cells, used cells, n_kv (the highest used cell + 1), and holes (empty cells below n_kv)."""
    n_used, n_kv = view.n_used, view.n_kv
    return f"{len(view.pos)} cells: {n_used} used, n_kv {n_kv}, {n_kv - n_used} holes"


def legend() -> str:
    """The meanings of the characters of a map."""
    return (
        f"{EMPTY} empty  a-z A-Z one sequence's  {SHARED} shared by several  {HELD} only held\n"
        f"< > K-shift pending, to a lower or higher position  {WAITING} K-shift waiting\n"
        "^ the attended span of the sequence that the last operation was about"
    )


def name(seq: int) -> Segment:
    """A sequence's letter in its colour."""
    return Segment(letter(seq), color_of(seq))


def seen_by(view: CellsView, seq: int) -> str:
    """What a sequence has in a group: the number of its cells, and their positions."""
    seen = view.seq[:, seq]
    positions = view.pos[seen]
    n_shared = int(np.sum(view.seq[seen].sum(axis=1) > 1))
    shared = f", {n_shared} of them shared" if n_shared else ""
    return f"{len(positions)} cells, positions {positions.min()}-{positions.max()}{shared}"


def _symbol(view: CellsView, cell: int) -> Segment:
    seqs = np.flatnonzero(view.seq[cell])
    if len(seqs) == 0:
        return Segment(HELD, HELD_COLOR) if view.held[cell] else Segment(EMPTY)
    return Segment(SHARED, SHARED_COLOR) if len(seqs) > 1 else name(int(seqs[0]))

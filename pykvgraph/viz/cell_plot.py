"""Draws the cells of a cache after each step of a script, one row per step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.types import CellsView
from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.text_map import HELD, SHARED, attended_span, letter

EMPTY_COLOR, SHARED_COLOR, HELD_COLOR = "#eeeeee", "#d62728", "#555555"
SEQUENCE_COLORS = (
    "#1f77b4",
    "#2ca02c",
    "#ff7f0e",
    "#9467bd",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#bcbd22",
    "#7f7f7f",
    "#aec7e8",
)
MAX_LETTERS = 128  # cells in a row; with more cells the letters would overlap


class Row(NamedTuple):
    """A step: a label, the cells after it, and the sequence whose attended span is marked, or None."""

    label: str
    cells: CellsView
    seq: int | None


def plot_rows(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF (by its suffix) with one line of cells for each Row: a colour per sequence,
    red for cells that several sequences see, dark grey for cells that only a hold keeps.

    Triangles mark cells whose K-shift is pending. A black line under a row marks the attended span. Raises
    ImportError without matplotlib, InvalidArgumentError when there are no rows or the suffix is another,
    OSError when the file can't be written.
    """
    if not rows:
        raise InvalidArgumentError("there are no steps to draw: give at least one row")
    from matplotlib.colors import to_rgb

    n_cells = len(rows[0].cells.pos)
    figure = new_figure(min(4 + n_cells * 0.14, 24), 1.6 + 0.34 * len(rows))
    axes = figure.add_subplot()
    palette = np.array([to_rgb(name) for name in (EMPTY_COLOR, SHARED_COLOR, HELD_COLOR, *SEQUENCE_COLORS)])
    axes.imshow(palette[[_codes(row.cells) for row in rows]], aspect="auto", interpolation="nearest")
    for y, (_, cells, seq) in enumerate(rows):
        if n_cells <= MAX_LETTERS:
            for x in np.flatnonzero(cells.pos >= 0).tolist():
                seqs = np.flatnonzero(cells.seq[x])
                name = letter(int(seqs[0])) if len(seqs) == 1 else SHARED if len(seqs) else HELD
                axes.text(x, y, name, ha="center", va="center", color="white", fontsize=7)
        for marker, shifted in (("<", cells.shift < 0), (">", cells.shift > 0)):
            places = np.flatnonzero(shifted)
            axes.scatter(
                places, np.full(len(places), y - 0.36), marker=marker, s=6, color="black", linewidths=0
            )
        span = range(0) if seq is None else attended_span(cells, seq)
        if span:
            axes.plot([span.start - 0.4, span.stop - 0.6], [y + 0.43] * 2, color="black", linewidth=1.5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], family="monospace", fontsize=8)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="y", color="white", linewidth=2)
    axes.tick_params(which="minor", length=0)
    axes.set_xlim(-0.5, n_cells - 0.5)
    axes.set_xlabel(
        "cell  (red *: shared; grey +: held; triangle: K-shift pending; line: the attended span)",
        fontsize=8,
    )
    save_figure(figure, path)


def _codes(cells: CellsView) -> npt.NDArray[np.int64]:
    """An index into the palette for each cell."""
    n_seqs = cells.seq.sum(axis=1)
    codes = 3 + cells.seq.argmax(axis=1) % len(SEQUENCE_COLORS)
    unseen = np.where(cells.held > 0, 2, 0)
    return np.where(n_seqs == 0, unseen, np.where(n_seqs > 1, 1, codes))

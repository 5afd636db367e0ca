"""Draws the cells of a cache after each step of a script, one row per step, groups side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.maps.colors import (
    BLACK,
    EMPTY_COLOR,
    HELD_COLOR,
    HOLE_COLOR,
    SEQUENCE_COLORS,
    SHARED_COLOR,
    color_of,
    ink,
)
from pykvgraph.kv_cache.maps.group import HELD, SHARED, attended_span, letter
from pykvgraph.kv_cache.maps.snapshot import CellMap
from pykvgraph.types import CellsView
from pykvgraph.viz.figure import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MAX_LETTERS = 128  # cells in a row; with more cells the letters would overlap
PALETTE = (EMPTY_COLOR, HOLE_COLOR, HELD_COLOR, SHARED_COLOR, *SEQUENCE_COLORS)


class Row(NamedTuple):
    """A step: a label, and the cells after it."""

    label: str
    map: CellMap


class _Panel(NamedTuple):
    """A group of cells, or the rows of states, after each step."""

    title: str
    views: list[CellsView]
    seqs: list[int | None]  # whose span is marked

    @property
    def n_cells(self) -> int:
        return len(self.views[0].pos)


def plot_rows(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF (by its suffix) with one line of cells for each Row: a colour per sequence,
    red for cells that several sequences see, dark grey for cells that only a hold keeps, grey for holes.

    Filled triangles mark cells whose K-shift is pending, empty ones those whose K-shift is waiting. A line
    under a row, in the colour of a sequence, marks the span that its next token attends over. Raises
    ImportError without matplotlib, InvalidArgumentError when there are no rows or the suffix is another,
    OSError when the file can't be written.
    """
    if not rows:
        raise InvalidArgumentError("there are no steps to draw: give at least one row")
    panels = _panels([row.map for row in rows])
    sizes = [max(panel.n_cells, 4) for panel in panels]
    n_cells = sum(sizes)
    figure = new_figure(min(4 + max(n_cells, 24) * 0.14, 24), 1.8 + 0.34 * len(rows))
    grid = figure.subplots(1, len(panels), squeeze=False, width_ratios=sizes)[0]
    for axes, panel in zip(grid, panels, strict=True):
        _draw(axes, panel, letters=n_cells <= MAX_LETTERS)
        axes.set_yticks(range(len(rows)), [])
    grid[0].set_yticks(range(len(rows)), [row.label for row in rows], family="monospace", fontsize=8)
    figure.legend(handles=_legend(panels), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


def _panels(maps: Sequence[CellMap]) -> list[_Panel]:
    panels = [
        _Panel(title, [each.views[index] for each in maps], [each.seq for each in maps])
        for index, title in enumerate(maps[0].titles)
    ]
    states = [each.states for each in maps if each.states is not None]
    return panels + ([_Panel("states", states, [None] * len(states))] if states else [])


def _draw(axes: Axes, panel: _Panel, *, letters: bool) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator

    palette = np.array([to_rgb(color) for color in PALETTE])
    codes = np.array([_codes(view) for view in panel.views])
    axes.imshow(palette[codes], aspect="auto", interpolation="nearest")
    for y, (view, seq) in enumerate(zip(panel.views, panel.seqs, strict=True)):
        if letters:
            for x in np.flatnonzero(view.pos >= 0).tolist():
                color = ink(PALETTE[codes[y, x]])
                axes.text(x, y, _name(view, x), ha="center", va="center", color=color, fontsize=7)
        for marker, shifted in (("<", view.shift < 0), (">", view.shift > 0)):
            for cells, face in ((shifted & ~view.waiting, BLACK), (shifted & view.waiting, "none")):
                places = np.flatnonzero(cells)
                axes.scatter(
                    places,
                    np.full(len(places), y - 0.36),
                    marker=marker,
                    s=6,
                    facecolors=face,
                    edgecolors=BLACK,
                    linewidths=0.4,
                )
        span = range(0) if seq is None else attended_span(view, seq)
        if span and seq is not None:
            axes.plot(
                [span.start - 0.4, span.stop - 0.6],
                [y + 0.5] * 2,
                color=color_of(seq),
                linewidth=2.5,
                zorder=3,
            )
    axes.set_yticks(np.arange(len(panel.views) + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="y", color="white", linewidth=5)
    axes.tick_params(which="minor", length=0)
    axes.set_xlim(-0.5, panel.n_cells - 0.5)
    axes.set_ylim(len(panel.views) - 0.3, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.set_title(panel.title, fontsize=8)


def _name(view: CellsView, cell: int) -> str:
    seqs = np.flatnonzero(view.seq[cell])
    return letter(int(seqs[0])) if len(seqs) == 1 else SHARED if len(seqs) else HELD


def _codes(view: CellsView) -> npt.NDArray[np.int64]:
    """An index into the palette for each cell."""
    n_seqs = view.seq.sum(axis=1)
    seen = 4 + view.seq.argmax(axis=1) % len(SEQUENCE_COLORS)
    empty = np.where(np.arange(len(view.pos)) < view.n_kv, 1, 0)
    unseen = np.where(view.held > 0, 2, empty)
    return np.where(n_seqs == 0, unseen, np.where(n_seqs > 1, 3, seen))


def _legend(panels: Sequence[_Panel]) -> list[Artist]:
    """What is in the picture: colours, and marks."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    views = [view for panel in panels for view in panel.views]
    present = set(np.concatenate([_codes(view) for view in views]).tolist())
    names = {
        0: "empty",
        1: "hole",
        2: f"{HELD} only held",
        3: f"{SHARED} shared",
    }
    seqs = np.flatnonzero(np.any([view.seq.any(axis=0) for view in views], axis=0)).tolist()
    handles: list[Artist] = [
        Patch(facecolor=color_of(seq), label=f"{letter(seq)} sequence {seq}") for seq in seqs[:8]
    ]
    handles += [Patch(facecolor=PALETTE[code], label=names[code]) for code in sorted(present & set(names))]
    marks = (
        ("K-shift pending", BLACK, any((view.shift != 0)[~view.waiting].any() for view in views)),
        ("K-shift waiting", "none", any(view.waiting.any() for view in views)),
    )
    for label, face, is_there in marks:
        if is_there:
            style = Line2D([], [], linestyle="", marker="<", markersize=4, markeredgecolor=BLACK)
            style.set(markerfacecolor=face, label=label)
            handles.append(style)
    if any(seq is not None for panel in panels for seq in panel.seqs):
        label = "attended span, in its sequence's colour"
        handles.append(Line2D([], [], color=BLACK, linewidth=2, label=label))
    return handles

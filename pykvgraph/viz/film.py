"""Draws what happens to the cells of a cache while one sequence reads a long text: a filmstrip."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.maps.colors import EMPTY_COLOR, HOLE_COLOR
from pykvgraph.types import CellsView
from pykvgraph.viz.figure import new_figure, save_figure

MAX_PIXELS = 320  # in a row; with more cells several share a pixel
MAX_ROWS = 24  # of more frames, so many are drawn, evenly spaced
MARK = "#d62728"


class Frame(NamedTuple):
    """The cells at a moment. marked: the cells that are marked."""

    label: str
    cells: CellsView
    marked: Sequence[int]


def plot_film(frames: Sequence[Frame], path: str | os.PathLike[str], title: str = "") -> None:
    """Writes a PNG, SVG or PDF (by its suffix) with a row for each frame.

    A cell's colour says how far from the start of the cached text its position is; marked cells are red, and
    a triangle points at them. Raises what plot_rows raises.
    """
    if not frames:
        raise InvalidArgumentError("there is nothing to draw: give at least one frame")
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, to_rgb

    frames = _some(frames)
    n_cells = len(frames[0].cells.pos)
    n_pixels = min(n_cells, MAX_PIXELS)
    norm = Normalize(0, max(1, *(int(frame.cells.pos.max(initial=0)) for frame in frames)))
    colors = colormaps["viridis"]
    figure = new_figure(8, 1.2 + 0.2 * len(frames))
    axes = figure.add_subplot()
    image = np.empty((len(frames), n_pixels, 3))
    for y, frame in enumerate(frames):
        positions, holes = _pixels(frame.cells, n_pixels)
        image[y] = colors(norm(np.nan_to_num(positions)))[:, :3]
        image[y, np.isnan(positions)] = to_rgb(EMPTY_COLOR)
        image[y, holes] = to_rgb(HOLE_COLOR)
        if len(frame.marked):
            marked = np.unique(np.asarray(frame.marked) * n_pixels // n_cells)
            image[y, marked] = to_rgb(MARK)
            axes.scatter(
                (marked + 0.5) * n_cells / n_pixels,
                np.full(len(marked), y - 0.42),
                marker="v",
                s=14,
                color=MARK,
                linewidths=0,
                zorder=3,
            )
    bounds = (0, n_cells, len(frames) - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=bounds)
    axes.set_yticks(range(len(frames)), [frame.label for frame in frames], fontsize=7)
    axes.set_yticks(np.arange(len(frames) + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="y", color="white", linewidth=3)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("cell (grey: empty)", fontsize=8)
    axes.set_title(title, fontsize=9)
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=axes, pad=0.01, aspect=30)
    bar.set_label("position in the cached text", fontsize=8)
    save_figure(figure, path)


def _some(frames: Sequence[Frame]) -> list[Frame]:
    n = min(len(frames), MAX_ROWS)
    return [frames[round(i * (len(frames) - 1) / max(n - 1, 1))] for i in range(n)]


def _pixels(cells: CellsView, n_pixels: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Of each pixel: the mean position in its cells, NaN where all are empty; whether all are holes."""
    n_cells = len(cells.pos)
    pixel = np.arange(n_cells) * n_pixels // n_cells
    used = cells.pos >= 0
    count = np.bincount(pixel[used], minlength=n_pixels)
    total = np.bincount(pixel[used], weights=cells.pos[used], minlength=n_pixels)
    positions = np.divide(total, count, out=np.full(n_pixels, np.nan), where=count > 0)
    ends = np.bincount(pixel).cumsum()  # the cell behind each pixel's last one
    return positions, (count == 0) & (ends <= cells.n_kv)

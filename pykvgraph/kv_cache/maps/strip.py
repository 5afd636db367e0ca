"""All cells of a group in one line, coloured by the part of the text that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvgraph.kv_cache.maps.colors import HELD_COLOR, color_of
from pykvgraph.kv_cache.maps.group import EMPTY, HELD, LETTERS
from pykvgraph.kv_cache.maps.lines import Line, Segment, merged
from pykvgraph.types import CellsView


def strip(view: CellsView, borders: Sequence[int], first: int, width: int) -> Line:
    """A line of at most `width` characters, each for a run of as many cells; the last may have fewer.

    borders: the position where each part of the text begins, in rising order. The first part has the number
    `first`; a number gives a part its letter and its colour. `+` is what comes before all parts, `.` a run
    that no sequence sees. A run shows the part that most of its cells belong to.
    """
    n_cells = len(view.pos)
    seen = np.asarray(view.seq.any(axis=1))
    per_run = max(-(-n_cells // max(width, 1)), 1)
    part = np.searchsorted(np.asarray(borders, np.int64), view.pos, side="right") - 1
    symbols = []
    for begin in range(0, n_cells, per_run):
        used = seen[begin : begin + per_run]
        parts, counts = np.unique(part[begin : begin + per_run][used], return_counts=True)
        symbols.append(_symbol(int(parts[counts.argmax()]), first) if len(parts) else Segment(EMPTY))
    return merged(symbols)


def _symbol(part: int, first: int) -> Segment:
    if part < 0:
        return Segment(HELD, HELD_COLOR)
    return Segment(LETTERS[(first + part) % len(LETTERS)], color_of(first + part))

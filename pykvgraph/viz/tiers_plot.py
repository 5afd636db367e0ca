"""A picture of where K and V are: the speed, what it takes on devices, and how one token goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.turns_plot import COLORS

if TYPE_CHECKING:
    from pykvgraph.bench.tiers import TierSpeed
    from pykvgraph.context.trace import Span

_QUANTITIES: dict[str, Callable[[TierSpeed], float]] = {
    "prompt, tokens/s": lambda each: each.prompt,
    "generation, tokens/s": lambda each: each.generation,
    "K, V and graphs on devices, MiB": lambda each: (each.cache_bytes + each.compute_bytes) / (1 << 20),
}
_TRACKS = ("copy in", "compute", "copy out")


def plot_tiers(
    title: str, speeds: Sequence[TierSpeed], spans: Sequence[Span], path: str | os.PathLike[str]
) -> None:
    """Writes a PNG, SVG or PDF. spans: of one token; without any, that part is left out.

    Raises ImportError without matplotlib, OSError when the file can't be written.
    """
    figure = new_figure(11, 6 if spans else 3.4)
    grid = figure.add_gridspec(2 if spans else 1, len(_QUANTITIES))
    for column, (name, of) in enumerate(_QUANTITIES.items()):
        axes = figure.add_subplot(grid[0, column])
        axes.set_title(name, fontsize=10)
        _draw_bars(axes, speeds, of)
        if column == 0:
            axes.legend(fontsize=8, loc="lower left")
    if spans:
        _draw_token(figure.add_subplot(grid[1, :]), spans)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw_bars(axes: Any, speeds: Sequence[TierSpeed], of: Callable[[TierSpeed], float]) -> None:
    """A bar for each tier, depth by depth; none where there was no room."""
    depths = sorted({each.depth for each in speeds})
    for i, tier in enumerate(dict.fromkeys(each.tier for each in speeds)):
        found = [each for each in speeds if each.tier == tier]
        places = [depths.index(each.depth) + (i - 1) * 0.27 for each in found]
        bars = axes.bar(places, [of(each) for each in found], 0.25, color=COLORS[i], label=tier)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(depths)), [f"{depth} tokens" for depth in depths], fontsize=8)
    axes.margins(y=0.15)


def _draw_token(axes: Any, spans: Sequence[Span]) -> None:
    """A line for each of copies in, computing and copies out; every other layer in its lower half."""
    start = min(span.begin for span in spans)
    layers = sorted({span.layer for span in spans})
    for span in spans:
        track = _TRACKS.index(span.track)
        axes.barh(
            track + (0.18 if layers.index(span.layer) % 2 else -0.18),
            (span.end - span.begin) * 1e3,
            left=(span.begin - start) * 1e3,
            height=0.34,
            color=COLORS[track],
        )
    axes.set_yticks(range(len(_TRACKS)), _TRACKS, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.set_title("one token with -kvt host, layer by layer", fontsize=10)

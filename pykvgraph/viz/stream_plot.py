"""A picture of what streams cost: a prompt and tokens, level by level, over each transport.

It has what figures 7 and 25 of DejaVu's paper (arXiv 2403.01876) have: levels, and totals beside no stream.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.turns_plot import COLORS

if TYPE_CHECKING:
    from pykvgraph.bench.streams import StreamSpeed

_TOTAL, _TOKENS = "prompt and tokens: percent more than without", "tokens: percent more than without"
_BEHIND = "prompt: milliseconds behind its last decode"
_QUANTITIES: dict[str, Callable[[StreamSpeed], float]] = {
    _TOTAL: lambda each: each.total_more * 100,
    _BEHIND: lambda each: each.behind * 1e3,
    _TOKENS: lambda each: each.token_more * 100,
}
_MOST = 5.0  # percent that level 3 may cost


def plot_streams(title: str, speeds: Sequence[StreamSpeed], path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF. Raises ImportError without matplotlib, OSError for an unwritable file."""
    figure = new_figure(12, 4)
    for axes, (name, of) in zip(figure.subplots(1, len(_QUANTITIES)), _QUANTITIES.items(), strict=True):
        axes.set_title(name, fontsize=10)
        _draw_bars(axes, speeds, of)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="y", alpha=0.3)
        if name == _BEHIND:
            axes.set_yscale("log")
            axes.set_ylim(top=4 * axes.get_ylim()[1])
        else:
            axes.axhline(_MOST, color="black", linewidth=0.8, linestyle="--")
        if name == _TOKENS:
            axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw_bars(axes: Any, speeds: Sequence[StreamSpeed], of: Callable[[StreamSpeed], float]) -> None:
    """A group for each level, in which each transport has a bar."""
    ways = list(dict.fromkeys((each.transport, each.depth) for each in speeds))
    several = len({depth for _, depth in ways}) > 1
    width = 0.8 / len(ways)
    names = {
        each.level: f"{each.level}\n{textwrap.fill(each.name, 11)}"
        for each in speeds
        if each.level is not None
    }
    levels = sorted(names)
    for i, way in enumerate(ways):
        own = {each.level: of(each) for each in speeds if (each.transport, each.depth) == way}
        places = [level + (i - (len(ways) - 1) / 2) * width for level in levels]
        label = f"{way[0]}, {way[1]} tokens" if several else way[0]
        heights = [own[level] for level in levels]
        bars = axes.bar(places, heights, 0.9 * width, color=COLORS[i % len(COLORS)], label=label)
        axes.bar_label(bars, fmt="%.3g", fontsize=6, rotation=90, padding=2)
    axes.set_xticks(levels, [names[level] for level in levels], fontsize=7)
    axes.margins(y=0.2)

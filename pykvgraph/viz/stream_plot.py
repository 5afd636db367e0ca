"""A picture of what streams cost: a prompt and tokens, level by level, over each transport."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.turns_plot import COLORS

if TYPE_CHECKING:
    from pykvgraph.bench.streams import StreamSpeed

_BEHIND, _TOKENS = "prompt: milliseconds behind its last decode", "tokens: percent more than without"
_QUANTITIES: dict[str, Callable[[StreamSpeed], float]] = {
    "prompt: milliseconds more than without": lambda each: each.prompt_more * 1e3,
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
        axes.set_xlabel("level", fontsize=8)
        axes.grid(axis="y", alpha=0.3)
        if name == _BEHIND:
            axes.set_yscale("log")
            axes.set_ylim(top=4 * axes.get_ylim()[1])
        elif name == _TOKENS:
            axes.axhline(_MOST, color="black", linewidth=0.8, linestyle="--")
            axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw_bars(axes: Any, speeds: Sequence[StreamSpeed], of: Callable[[StreamSpeed], float]) -> None:
    """A group for each level, in which each transport has a bar."""
    transports = list(dict.fromkeys(each.transport for each in speeds))
    width = 0.8 / len(transports)
    for i, transport in enumerate(transports):
        found = [each for each in speeds if each.transport == transport and each.level is not None]
        places = [
            each.level + (i - (len(transports) - 1) / 2) * width for each in found if each.level is not None
        ]
        heights = [of(each) for each in found]
        bars = axes.bar(places, heights, 0.9 * width, color=COLORS[i % len(COLORS)], label=transport)
        axes.bar_label(bars, fmt="%.3g", fontsize=6, rotation=90, padding=2)
    axes.set_xticks(sorted({each.level for each in speeds if each.level is not None}))
    axes.margins(y=0.2)

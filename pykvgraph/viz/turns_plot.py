"""A picture of conversations: tokens decoded again, and the time to the first token, turn by turn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pykvgraph.viz.figure import new_figure, save_figure

if TYPE_CHECKING:
    from pykvgraph.bench.turns import MeasuredTurn

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def plot_turns(
    conversations: Mapping[str, Mapping[str, Sequence[MeasuredTurn]]], path: str | os.PathLike[str]
) -> None:
    """Writes a PNG: a row for each model, whose engines have a line each.

    conversations: the turns by model, then by engine. Raises ImportError without matplotlib, OSError when the
    file can't be written.
    """
    figure = new_figure(11, 0.6 + 2.9 * len(conversations))
    grid = figure.subplots(len(conversations), 2, squeeze=False, sharex="row")
    for (again, first), (model, engines) in zip(grid, conversations.items(), strict=True):
        for i, (engine, turns) in enumerate(engines.items()):
            names = [turn.name for turn in turns]
            style: dict[str, Any] = {
                "color": COLORS[i % len(COLORS)],
                "marker": "o" if i == 0 else ".",
                "label": engine,
            }
            style |= {"zorder": 9 - i, "linewidth": 2 if i == 0 else 1}
            again.plot(names, [turn.n_again for turn in turns], **style)
            first.plot(names, [turn.seconds for turn in turns], **style)
        again.set_title(f"{model}: old tokens decoded again", fontsize=10)
        first.set_title(f"{model}: seconds to the first token", fontsize=10)
        again.set_yscale("symlog", linthresh=1)
        again.set_ylim(-0.2, max(10, 2 * again.get_ylim()[1]))
        first.set_yscale("log")
        for axes in (again, first):
            axes.tick_params(axis="x", labelrotation=60, labelsize=8)
            axes.grid(alpha=0.3)
        first.legend(fontsize=8)
    save_figure(figure, path)

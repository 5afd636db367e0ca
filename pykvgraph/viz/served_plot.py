"""A picture of requests that were served: how long their first tokens took, and the gaps between tokens."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.turns_plot import COLORS

if TYPE_CHECKING:
    from pykvgraph.bench.requests import Served


def plot_served(title: str, served: Mapping[str, Sequence[Served]], path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF: of each name a line, over all of its runs.

    A point of a line: this share of the waits was not longer. Raises ImportError without matplotlib, OSError
    when the file can't be written.
    """
    figure = new_figure(11, 4)
    first, gap = figure.subplots(1, 2, sharey=True)
    for i, (name, runs) in enumerate(served.items()):
        speed = statistics.median(run.speed for run in runs)
        label = f"{name}: {speed:.3g} tokens/s"
        for axes, waits in ((first, [run.first for run in runs]), (gap, [run.gaps for run in runs])):
            seconds = np.sort(np.concatenate(waits))
            share = np.arange(1, len(seconds) + 1) / len(seconds)
            axes.step(seconds, share, where="post", color=COLORS[i % len(COLORS)], label=label)
    figure.suptitle(title, fontsize=11)
    first.set_title("from a request to its first token", fontsize=10)
    gap.set_title("from a token to the next one of the same request", fontsize=10)
    first.set_ylabel("share of them")
    for axes in (first, gap):
        axes.set_xlabel("seconds, at most")
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    first.legend(fontsize=8)
    save_figure(figure, path)

"""A picture of routing: what caches had of prompts, and how long people waited, by the number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.turns_plot import COLORS

_LINES = "-", "--", ":", "-."
_NAMES = {"router": "the router", "index": "with a central index", "load": "by load alone"}


class Routed(NamedTuple):
    """One run. hits: the part of the prompts' tokens that caches had. first_p50, first_p95: seconds to first
    tokens. tokens_per_second: of all workers. busy: the part of the time in which they decoded.
    """

    n_workers: int
    policy: str
    hits: float
    first_p50: float
    first_p95: float
    tokens_per_second: float
    choice_seconds: float
    busy: float


def plot_routing(runs: Mapping[str, Sequence[Routed]], path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF: a colour for each policy, a kind of line for each model.

    Raises ImportError without matplotlib, OSError when the file can't be written.
    """
    figure = new_figure(13, 4.2)
    panels: list[tuple[str, str, Callable[[Routed], float]]] = [
        ("what caches had of the prompts", "% of the tokens", lambda run: 100 * run.hits),
        ("half of the first tokens came within", "seconds", lambda run: run.first_p50),
        ("a choice took", "microseconds", lambda run: 1e6 * run.choice_seconds),
    ]
    found = figure.subplots(1, len(panels))
    for axes, (title, unit, value) in zip(found, panels, strict=True):
        for line, (model, each) in zip(_LINES * len(runs), runs.items(), strict=False):
            for color, (policy, name) in zip(COLORS, _NAMES.items(), strict=False):
                points = [(run.n_workers, value(run)) for run in each if run.policy == policy]
                axes.plot(
                    *zip(*points, strict=True),
                    line,
                    color=color,
                    marker="o",
                    markersize=4,
                    label=f"{model}, {name}",
                )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("workers")
        axes.set_ylabel(unit)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.legend(*found[0].get_legend_handles_labels(), loc="outside lower center", ncol=3, fontsize=8)
    save_figure(figure, path)

"""A picture of routing: what caches had of prompts, and how long people waited, by the number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.turns_plot import COLORS

_LINES = "-", "--", ":", "-."
_NAMES = {
    "router": "the router",
    "index": "with a central index",
    "load": "by load alone",
    "tiers": "the router, tiers",
    "roles": "the router, tiers and roles",
}


class Routed(NamedTuple):
    """One run. n_readers: of the workers, those that only read prompts. hits: the part of the prompts' tokens
    that caches had. first_p50, first_p95: seconds to first tokens. token_p50: seconds of each further one.
    gap_p95: the longest seconds between two. tokens_per_second: of all workers. busy: the part of the time in
    which they decoded.
    """

    n_workers: int
    policy: str
    n_readers: int
    hits: float
    first_p50: float
    first_p95: float
    token_p50: float
    gap_p95: float
    tokens_per_second: float
    choice_seconds: float
    busy: float


def plot_routing(runs: Mapping[str, Sequence[Routed]], path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF: a colour for each policy, a kind of line for each model.

    Raises ImportError without matplotlib, OSError when the file can't be written.
    """
    figure = new_figure(13, 8.4)
    panels: list[tuple[str, str, Callable[[Routed], float]]] = [
        ("what caches had of the prompts", "% of the tokens", lambda run: 100 * run.hits),
        ("half of the first tokens came within", "seconds", lambda run: run.first_p50),
        ("95% of the first tokens came within", "seconds", lambda run: run.first_p95),
        ("of half of the answers, a token took", "milliseconds", lambda run: 1e3 * run.token_p50),
        ("workers were busy", "% of the time", lambda run: 100 * run.busy),
        ("a choice took", "microseconds", lambda run: 1e6 * run.choice_seconds),
    ]
    found = figure.subplots(2, len(panels) // 2).flat
    for axes, (title, unit, value) in zip(found, panels, strict=True):
        for line, (model, each) in zip(_LINES * len(runs), runs.items(), strict=False):
            for color, (policy, name) in zip(COLORS, _NAMES.items(), strict=False):
                points = [(run.n_workers, value(run)) for run in each if run.policy == policy]
                axes.plot(
                    [n for n, _ in points],
                    [y for _, y in points],
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
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncol=2 if len(runs) > 1 else 3,
        fontsize=8,
    )
    save_figure(figure, path)

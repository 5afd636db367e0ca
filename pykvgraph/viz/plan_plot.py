"""A picture of a plan: what a model and its cache take on each device, and how long steps last."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pykvgraph.model.device_types import DevicePart
from pykvgraph.plan.time_model import cells_of_run
from pykvgraph.viz.figure import new_figure, save_figure

if TYPE_CHECKING:
    from pykvgraph.plan.fitting import Fit
    from pykvgraph.plan.time_model import StepSample, TimeModel

_N_SIZES = 8
_KINDS = {"weights": "#8c8c8c", "cells": "#1f77b4", "graphs": "#ff7f0e"}
_DEPTH_COLORS = ("#1f77b4", "#d62728")
_MIB = 1 << 20


def plot_plan(
    title: str,
    fit: Fit,
    parts_with: Callable[[int], Sequence[DevicePart]],
    path: str | os.PathLike[str],
    times: TimeModel | None = None,
    samples: Sequence[StepSample] = (),
) -> None:
    """Writes a PNG, SVG or PDF: a panel for each device, up to a quarter more cells than fit.

    parts_with: the plan for a number of cells. times, samples: how long steps last, and what was measured,
    for one panel more. Raises as save_figure does.
    """
    sizes = [max(fit.n_ctx * 5 * i // (4 * _N_SIZES), 1) for i in range(1, _N_SIZES + 1)]
    plans = [parts_with(n) for n in sizes]
    n_panels = len(fit.parts) + (times is not None)
    figure = new_figure(4.5 * n_panels + 2, 4)
    panels = figure.subplots(1, n_panels, squeeze=False)[0]
    if times is not None:
        _draw_times(panels[-1], times, samples)
    for i, (axes, part, limit) in enumerate(zip(panels, fit.parts, fit.limits, strict=False)):
        here = [plan[i] for plan in plans]
        layers = [
            [part.weight_bytes / _MIB for part in here],
            [part.cache_bytes / _MIB for part in here],
            [part.compute_bytes / _MIB for part in here],
        ]
        axes.stackplot(sizes, layers, labels=list(_KINDS), colors=list(_KINDS.values()), alpha=0.8)
        axes.axvline(fit.n_ctx, color="black", linewidth=1, label=f"{fit.n_ctx:,} cells fit")
        may_take = (limit + part.mapped_bytes) / _MIB
        if may_take < 1.3 * sum(layer[-1] for layer in layers):
            axes.axhline(may_take, color="#d62728", linestyle="--", label="may be taken")
        axes.set_title(part.device, fontsize=10)
        axes.set_xlabel("cells")
        axes.set_xlim(sizes[0], sizes[-1])
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("MiB")
    panels[0].legend(fontsize=8, loc="upper left")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw_times(axes: Any, times: TimeModel, samples: Sequence[StepSample]) -> None:
    """Points as measured, a colour for each number of cells before them, and lines as learned."""
    depths = sorted({_depth(each) for each in samples})
    for depth, color in zip(depths, _DEPTH_COLORS, strict=False):
        here = [each for each in samples if _depth(each) == depth]
        tokens = [each.n_tokens for each in here]
        axes.plot(tokens, [1000 * each.seconds for each in here], "o", color=color, markersize=4)
        lines = range(1, max(tokens) + 1)
        learned = [1000 * times.seconds(n, cells_of_run(depth, n)) for n in lines]
        axes.plot(lines, learned, "-", color=color, linewidth=1, label=f"behind {depth:,} cells")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("a step, as measured and as learned", fontsize=10)
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")


def _depth(sample: StepSample) -> int:
    """How many cells were before the first of its tokens."""
    return (sample.n_cells - cells_of_run(0, sample.n_tokens)) // sample.n_tokens

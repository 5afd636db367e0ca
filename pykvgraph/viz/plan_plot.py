"""A picture of a plan: what a model and its cache take on each device, by the number of cells."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pykvgraph.types import DevicePart
from pykvgraph.viz.figure import new_figure, save_figure

if TYPE_CHECKING:
    from pykvgraph.plan.fitting import Fit

_N_SIZES = 8
_KINDS = {"weights": "#8c8c8c", "cells": "#1f77b4", "graphs": "#ff7f0e"}
_MIB = 1 << 20


def plot_plan(
    title: str,
    fit: Fit,
    parts_with: Callable[[int], Sequence[DevicePart]],
    path: str | os.PathLike[str],
) -> None:
    """Writes a PNG, SVG or PDF: a panel for each device, up to a quarter more cells than fit.

    parts_with: the plan for a number of cells. Raises as save_figure does.
    """
    sizes = [max(fit.n_ctx * 5 * i // (4 * _N_SIZES), 1) for i in range(1, _N_SIZES + 1)]
    plans = [parts_with(n) for n in sizes]
    figure = new_figure(4.5 * len(fit.parts) + 2, 4)
    panels = figure.subplots(1, len(fit.parts), squeeze=False)[0]
    for i, (axes, part, limit) in enumerate(zip(panels, fit.parts, fit.limits, strict=True)):
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

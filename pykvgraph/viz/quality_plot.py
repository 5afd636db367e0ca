"""A picture of quality: what each case costs against the cells that it keeps, a line for each policy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pykvgraph.viz.figure import new_figure, save_figure
from pykvgraph.viz.turns_plot import COLORS

_MARKERS = "os^Dv*PX"
_N_COLUMNS = 3


class QualityPoint(NamedTuple):
    """A case: its policy, of which it is a point of the line, cells that it keeps, and values by panel."""

    case: str
    policy: str
    n_cells: float
    values: Mapping[str, float]


def plot_quality(title: str, points: Sequence[QualityPoint], path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF. The first point is what the others are compared with: a dashed line.

    All points have the same values. Values named KL are on a scale of logarithms; those of 0 are left out.
    Raises as save_figure does.
    """
    names = list(points[0].values)
    n_columns = min(_N_COLUMNS, len(names))
    n_rows = -(-len(names) // n_columns)
    n_policies = len({point.policy for point in points})
    figure = new_figure(4.2 * n_columns, 3.1 * n_rows + 0.4 + 0.25 * -(-n_policies // 3))
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flat
    for axes, name in zip(panels, names, strict=False):
        _draw(axes, name, points)
    for axes in list(figure.axes)[len(names) :]:
        axes.set_axis_off()
    named: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend([*named.values()], [*named], loc="outside lower left", fontsize=8, ncols=3)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _draw(axes: Any, name: str, points: Sequence[QualityPoint]) -> None:
    """One panel: what is measured, against cells."""
    is_kl = name.startswith("KL")
    reference = points[0].values[name]
    if not is_kl or reference > 0:
        axes.axhline(reference, color="black", linestyle="--", linewidth=1, label=points[0].case)
    for i, policy in enumerate(dict.fromkeys(point.policy for point in points[1:])):
        line = sorted((p.n_cells, p.values[name]) for p in points[1:] if p.policy == policy)
        shown = [each for each in line if each[1] > 0 or not is_kl]
        axes.plot(
            [n for n, _ in shown],
            [value for _, value in shown],
            color=COLORS[i % len(COLORS)],
            marker=_MARKERS[i % len(_MARKERS)],
            label=policy,
        )
    if is_kl:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")  # 0.02, as in tables
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif name != "perplexity":
        axes.set_ylim(-0.05, 1.05)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("cells")
    axes.grid(alpha=0.3)

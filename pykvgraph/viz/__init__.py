"""Pictures of the cache: a map of the cells for the terminal, and as a PNG, SVG or PDF (with matplotlib)."""

from pykvgraph.viz.cell_plot import Row, plot_rows
from pykvgraph.viz.figure import new_figure, require_matplotlib, save_figure
from pykvgraph.viz.text_map import cell_map, checkpoint_lines, legend, state_map
from pykvgraph.viz.turns_plot import plot_turns

__all__ = [
    "Row",
    "cell_map",
    "checkpoint_lines",
    "legend",
    "new_figure",
    "plot_rows",
    "plot_turns",
    "require_matplotlib",
    "save_figure",
    "state_map",
]

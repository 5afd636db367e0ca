"""Pictures of the cache: a map of the cells for the terminal, and as a PNG, SVG or PDF (with matplotlib)."""

from pykvgraph.kv_cache.maps.group import legend
from pykvgraph.kv_cache.maps.snapshot import CellMap
from pykvgraph.viz.cell_plot import Row, plot_rows
from pykvgraph.viz.figure import new_figure, require_matplotlib, save_figure
from pykvgraph.viz.film import Frame, plot_film
from pykvgraph.viz.quality_plot import QualityPoint, plot_quality
from pykvgraph.viz.routing_plot import Routed, plot_routing
from pykvgraph.viz.served_plot import plot_served
from pykvgraph.viz.stream_plot import plot_streams
from pykvgraph.viz.text_map import cell_map
from pykvgraph.viz.tiers_plot import plot_tiers
from pykvgraph.viz.turns_plot import plot_turns

__all__ = [
    "CellMap",
    "Frame",
    "QualityPoint",
    "Routed",
    "Row",
    "cell_map",
    "legend",
    "new_figure",
    "plot_film",
    "plot_quality",
    "plot_routing",
    "plot_rows",
    "plot_served",
    "plot_streams",
    "plot_tiers",
    "plot_turns",
    "require_matplotlib",
    "save_figure",
]

"""matplotlib, which is not a dependency: imported when something is to be drawn."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raises ImportError, with what to do, when matplotlib is missing: for asking before the work is done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("drawing needs matplotlib: pip install 'pykvgraph[plot]'")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that needs no display. Raises ImportError as require_matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")

"""Access to matplotlib, an optional dependency: it is imported only when something is drawn."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Raises ImportError, which says how to install it, when matplotlib is missing.

    Call it before long work whose result is to be drawn.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("drawing needs matplotlib: pip install 'pykvgraph[plot]'")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes are in inches. It needs no display. Raises ImportError as require_matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")

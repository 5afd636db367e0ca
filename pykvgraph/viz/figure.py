"""Access to matplotlib, an optional dependency: it is imported only when something is drawn."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from pykvgraph.errors import InvalidArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")  # the suffixes of the files that can be drawn


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


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a PNG, SVG or PDF, by the suffix. Raises InvalidArgumentError for another one."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in PICTURES:
        raise InvalidArgumentError(f"{os.fspath(path)!r}: its suffix must be {', '.join(PICTURES)}")
    figure.savefig(path, format=suffix[1:], dpi=120)

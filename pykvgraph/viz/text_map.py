"""The map of the cells as text."""

from __future__ import annotations

from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.maps.snapshot import map_of
from pykvgraph.types import CellsView


def cell_map(
    cells: KVCache | CellsView, *, seq: int | None = None, width: int = 80, color: bool = False
) -> str:
    """A map of the whole cache, or of a view of one group, as CellMap.text() draws it.

    seq: whose attended span is marked. Raises InvalidArgumentError for a width below 20, or an id of a
    sequence that is out of range.
    """
    whole = cells.cell_map(seq) if isinstance(cells, KVCache) else map_of(cells, seq)
    return whole.text(width=width, color=color)

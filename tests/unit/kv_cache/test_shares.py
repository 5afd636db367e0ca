"""Shares as a line of characters."""

from __future__ import annotations

from pykvgraph.kv_cache.maps.lines import as_text
from pykvgraph.kv_cache.maps.shares import shares_line


def test_tenths() -> None:
    """Nothing and all are never rounded to."""
    assert as_text([shares_line([0, 1e-9, 0.5, 0.94, 0.999, 1])]) == ".1599#"


def test_the_more_is_left_the_darker() -> None:
    greys = [int(shares_line([share])[0].color[1:3], 16) for share in (0, 0.3, 0.6, 1)]
    assert greys == sorted(greys, reverse=True) and len(set(greys)) == 4

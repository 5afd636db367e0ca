"""Shares from 0 to 1 as a line, one character each: how much is left of each part of a text."""

from __future__ import annotations

from collections.abc import Sequence

from pykvgraph.kv_cache.maps.lines import Line, Segment, merged

_NONE, _ALL = ".", "#"
_LIGHT, _DARK = 0xEE, 0x30  # grey, as far as something is left


def shares_line(shares: Sequence[float]) -> Line:
    """`.` is nothing, `#` all, a digit so many tenths; the more is left, the darker. A trace is a 1."""
    return merged([_segment(share) for share in shares])


def _segment(share: float) -> Segment:
    tenths = min(max(round(10 * share), 1), 9)
    grey = round(_LIGHT + (_DARK - _LIGHT) * share)
    return Segment(
        _NONE if share <= 0 else _ALL if share >= 1 else str(tenths), f"#{grey:02x}{grey:02x}{grey:02x}"
    )

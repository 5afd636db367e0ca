"""What is worth loading of a text from outside the cells, and how it is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.prefix.match import Found
from pykvgraph.tiers.loader import Prefetch
from pykvgraph.tiers.peers import Cost
from pykvgraph.tiers.record import Name


class Plan(NamedTuple):
    """found: what the cells have, up to the first part. names: the parts behind it. n: how many of its tokens
    the text has then. known: how many of them are in cells or parts, though the model may not go on from all.
    cost: of loading. seconds: that decoding takes in its place. on_disk: of each part, whether it is there
    alone.
    """

    found: Found
    names: Sequence[Name]
    n: int
    known: int
    cost: Cost
    seconds: float
    on_disk: Sequence[bool]

    @property
    def end(self) -> int:
        """Where the last part ends."""
        return self.names[-1].span.stop


class Fetch(NamedTuple):
    """A plan under way. late: when nobody waits for it any more, by time.monotonic()."""

    plan: Plan
    job: Prefetch
    late: float

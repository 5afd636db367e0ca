"""What a text gets from outside the cells while others decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.prefix.index import Found
from pykvgraph.tiers.loader import Job
from pykvgraph.tiers.rate import Cost
from pykvgraph.tiers.record import Name


class Plan(NamedTuple):
    """found: what the cells have, up to the first part. names: the parts behind it. known: tokens of the text
    that are in the cells or in parts, though the model may not go on from all of them. cost: of loading.
    seconds: that decoding takes in its place.
    """

    found: Found
    names: Sequence[Name]
    known: int
    cost: Cost
    seconds: float

    @property
    def n(self) -> int:
        """How many tokens the text has when all of it has come."""
        return self.names[-1].span.stop


class Fetch(NamedTuple):
    """A plan under way. late: when nobody waits for it any more, by time.monotonic()."""

    plan: Plan
    job: Job
    late: float

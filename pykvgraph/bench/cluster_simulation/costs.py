"""What simulated workers take their time for."""

from __future__ import annotations

from dataclasses import dataclass

from pykvgraph.plan.time_model import TimeModel

# bytes a second: from a tier in memory into cells, as benchmarks/tiers.py has measured it; and from one
# worker to another, over a network of 10 Gbit/s
LOADED, SENT = 0.8e9, 1.25e9


@dataclass(frozen=True)
class Costs:
    """times: of steps. cell_bytes: of all rows of a token."""

    times: TimeModel
    cell_bytes: int

    def loading(self, n_tokens: int) -> float:
        """Seconds until rows of so many tokens, from memory, are cells."""
        return n_tokens * self.cell_bytes / LOADED

    def sending(self, n_tokens: int) -> float:
        """Seconds until rows of so many tokens are at another worker."""
        return n_tokens * self.cell_bytes / SENT

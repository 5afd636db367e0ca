"""What simulated workers have in their caches."""

from __future__ import annotations

from collections.abc import Sequence

from pykvgraph.cluster.prefixes import TOKEN_BYTES, Block, Prefixes


class Caches(Prefixes):
    """Texts by worker; what was used longest ago goes first.

    A router that is given them knows at every moment what every worker has: it is the central index with
    which the real one is compared.
    """

    def remember(self, worker: int, blocks: Sequence[Block]) -> None:
        """Nothing: the worker is only asked."""

    def store(self, worker: int, blocks: Sequence[Block]) -> None:
        """The worker has decoded this text; what has no room beside it goes."""
        super().remember(worker, blocks)

    def n_cached(self, worker: int, blocks: Sequence[Block]) -> int:
        """Tokens of the text that the worker has."""
        return self.length(worker, blocks) // TOKEN_BYTES

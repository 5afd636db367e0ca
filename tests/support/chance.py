"""How much is tried at random, and which trials these are.

A commit tries a tenth of what is tried by the thousand, and always the same trials: whatever fails then is
the commit's fault. `make thorough` sets KVGRAPH_THOROUGH=1 and a fresh KVGRAPH_SEED: all of it, and other
trials each time. pytest prints the seed.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("KVGRAPH_THOROUGH") == "1"
SHARE = 1 if THOROUGH else 10  # one in so many
SEED = int(os.environ.get("KVGRAPH_SEED", "0"))  # 0: a commit's


def seed(of: int | str) -> int | str:
    """A seed for `random.Random`: the test's own on a commit, another one with each KVGRAPH_SEED."""
    return f"{SEED}-{of}" if SEED else of


def number(of: int) -> int:
    """The same for NumPy, which takes numbers alone."""
    return of + (SEED << 32)

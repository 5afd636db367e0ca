"""How much is tried at random, and which trials these are.

A commit tries a tenth of what is tried by the thousand, and always the same trials: whatever fails then is
the commit's fault. `make thorough` sets KVGRAPH_THOROUGH=1 and a fresh KVGRAPH_SEED: all of it, and other
trials each time. pytest prints the seed.
What a seed changes is marked `at_random`, file by file: whatever imports this module, or hypothesis.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

SUPPORT = Path(__file__).parent
THOROUGH = os.environ.get("KVGRAPH_THOROUGH") == "1"
SHARE = 1 if THOROUGH else 10  # one in so many
SEED = int(os.environ.get("KVGRAPH_SEED", "0"))  # 0: a commit's


def seed(of: int | str) -> int | str:
    """A seed for `random.Random`: the test's own on a commit, another one with each KVGRAPH_SEED."""
    return f"{SEED}-{of}" if SEED else of


def number(of: int) -> int:
    """The same for NumPy, which takes numbers alone."""
    return of + (SEED << 32)


@cache
def decides(file: Path) -> bool:
    """Whether what this file tries is another thing with another seed.

    It imports this module, or hypothesis, or what does so in tests/support; or starts it: `-m support.…`.
    """
    if file == Path(__file__):
        return True
    text = file.read_text(encoding="utf-8")
    lists = re.findall(r"^from support import (\([^)]*\)|.+)$", text, re.MULTILINE)
    names = {*re.findall(r"\bsupport\.(\w+)", text), *re.findall(r"\w+", " ".join(lists))} - {file.stem}
    others = [SUPPORT / f"{name}.py" for name in sorted(names)]
    return bool(re.search(r"^(from|import) hypothesis\b", text, re.MULTILINE)) or any(
        decides(other) for other in others if other.exists()
    )

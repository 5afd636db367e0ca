"""One of several processes with a directory of prefixes.

    python -m support.tier_process MODEL FOLDER DEVICE SEED

Asks for prompts at random. Prints as JSON what was said to which, misses by reason, tokens loaded, and the
most bytes that were in the directory.
"""

from __future__ import annotations

import fcntl
import json
import random
import sys
from pathlib import Path

import pykvgraph as kvg
from pykvgraph.engine import fetches
from support.soak import F32

SHORT = kvg.SamplingParams(max_tokens=4, temperature=0)
LIMIT = 200_000  # bytes of the directory
N_REQUESTS = 40


def prompts_of(model: kvg.Model) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(model.n_vocab) for _ in range(100)] for _ in range(12)]


def bytes_in(folder: Path) -> int:
    """Of the records that are there, and of those that are being written; nothing is renamed meanwhile."""
    with (folder / "pykvgraph.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(
            each.stat().st_size for each in folder.iterdir() if each.suffix in (".block", ".end", ".tmp")
        )


def main(path: str, folder: Path, device: str, seed: int) -> None:
    fetches.decode_seconds = lambda ctx: lambda first, end: 60.0
    rng, said, most = random.Random(seed), [], 0
    tiers = kvg.Tiers("100K", LIMIT, folder)
    with (
        kvg.Model(path, device=device) as model,
        kvg.Engine(model, n_ctx=256, n_seq_max=2, tiers=tiers, **F32) as engine,
    ):
        prompts = prompts_of(model)
        for _ in range(N_REQUESTS):
            at = rng.randrange(len(prompts))
            said.append((at, engine.submit(prompts[at], SHORT).result().tokens))
            most = max(most, bytes_in(folder))
        stats = engine.stats().tiers
    assert stats is not None
    misses = {reason: n for reason, n in stats.misses.items() if n}
    print(json.dumps({"said": said, "misses": misses, "loaded": stats.loaded_tokens, "most": most}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

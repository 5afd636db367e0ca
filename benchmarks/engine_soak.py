"""An engine under random requests, cancels and faults, for as long as one likes; RSS shows leaks.

    make build/bars/libkvgraph.so
    KVGRAPH_LIB=build/bars/libkvgraph.so python benchmarks/engine_soak.py --minutes 60

Ends with an error at the first wrong account or answer, whose seed the last line names.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import tempfile
import time
from pathlib import Path
from typing import Any

import shapes  # noqa: F401 puts tests/ on the path
from support.architectures import ArchSpec, write_architecture
from support.recurrent import DELTA_NET
from support.soak import Soak, has_faults, soak_of_few_cells
from support.soak_of_prefixes import PrefixSoak

import pykvgraph as kvg

SPECS = [
    ArchSpec("llama", 2, 32, 2, 1, 16, 32),
    ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8),
    ArchSpec("gpt-oss", 2, 64, 4, 2, 32, 32, n_expert=4, window=24),
    DELTA_NET,
]
N_STEPS = 2000


def rss_kib() -> int:
    """Memory that this process has now, without what malloc only keeps."""
    with contextlib.suppress(AttributeError):  # where it is not glibc's
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    args = parser.parse_args()
    print("with faults" if has_faults() else "without faults: this libkvgraph has none")
    end, seed = time.monotonic() + 60 * args.minutes, args.seed
    with tempfile.TemporaryDirectory() as directory:
        models = [kvg.Model(write_architecture(spec, Path(directory)), device="cpu") for spec in SPECS]
        while time.monotonic() < end:
            for model in models:
                # without drafts, with n-grams, and with the model itself as its draft, where it may be one
                itself = model if model.arch != DELTA_NET.arch else None
                draft: Any = (None, "ngram", itself)[seed // 2 % 3]
                print(f"seed {seed}, {model.arch}: ", end="", flush=True)
                # every fifth round takes as many cells as fit, where few do
                is_auto = seed % 5 == 4
                show(
                    soak_of_few_cells(model, seed, draft)
                    if is_auto
                    else Soak(model, seed, seed % 2 == 1, draft),
                    may_lack=seed % 2 == 1 and not is_auto,
                )
            print(f"seed {seed}, compressed prefixes: ", end="", flush=True)
            show(PrefixSoak(models[0], seed, seed % 2 == 1), may_lack=seed % 2 == 1)
            seed += 1


def show(soak: Soak, may_lack: bool) -> None:
    """Runs it, and prints what it did. may_lack: whether texts may have to wait for cells."""
    soak.vary_drafts()
    soak.run(N_STEPS, faults=has_faults())
    stats = soak.engine.stats()
    soak.close()
    assert stats.n_preempted == 0 or may_lack, "a text lacked cells"
    print(f"{stats.accepted} of {stats.drafted} draft tokens held, {soak.n_forgotten} forgotten, ", end="")
    print(f"{soak.n_edited} from approximate cells, ", end="")
    print(f"{stats.decoded_tokens} tokens, {soak.n_failed} requests failed, {rss_kib()} KiB")


if __name__ == "__main__":
    main()

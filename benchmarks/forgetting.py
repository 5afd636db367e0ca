"""What it costs to choose cells and to forget them: processor time, beside that of reading the text.

    python benchmarks/forgetting.py MODEL [--tokens 16384]

Policies: seconds to score all cells of a text, and their share of the seconds that it took to read it.
Eviction: 128 scattered cells of it are forgotten; the median of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import pykvgraph as kvg
from pykvgraph.context.cell_scores import POLICIES
from pykvgraph.context.forgetting import chosen
from pykvgraph.context.second_reading import read_again

N_ROUNDS, N_GONE = 15, 128


def seconds(work: Callable[[], object]) -> float:
    """Of all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=16384, help="of the text")
    parser.add_argument("-t", type=int, default=1, help="threads")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    with kvg.Model(args.model, device="cpu") as model:
        ids = rng.integers(3, model.n_vocab, args.tokens).tolist()
        with kvg.Context(model, n_ctx=args.tokens + 256, n_threads=args.t) as ctx:
            reading = seconds(lambda: kvg.Sequence(ctx).set(ids))
            print(f"{args.tokens} tokens are read in {reading:.2f} s")
            for policy in (name for name, each in POLICIES.items() if not each.repeats):
                found = statistics.median(
                    seconds(
                        lambda: chosen(
                            ctx,
                            0,
                            lambda _: N_GONE,
                            policy,  # noqa: B023
                            lambda n: read_again(ctx, 0, ids[-n:]),
                        )
                    )
                    for _ in range(3)
                )
                print(f"{policy:8} {1000 * found:8.1f} ms, {100 * found / reading:5.2f} %")
            times = []
            for _ in range(N_ROUNDS):
                places = np.unique(ctx.kv.cells().pos[ctx.kv.cells().seq[:, 0]])[4:-64]
                gone = np.sort(rng.choice(places, N_GONE, replace=False)).astype(np.int64)
                begin = time.perf_counter()
                ctx.kv._seq_rm_at(0, gone)
                times.append(time.perf_counter() - begin)
            print(f"{N_GONE} scattered cells are forgotten in {1000 * statistics.median(times):.2f} ms")


if __name__ == "__main__":
    main()

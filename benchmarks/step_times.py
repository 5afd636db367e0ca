"""How long steps last, as a TimeModel says after a second, beside steps that it has not seen.

    python benchmarks/step_times.py MODEL...

Sizes and depths are others than those that are learned from. Where a model has recurrent layers the cache is
empty before each step.
"""

from __future__ import annotations

import statistics
import sys
import time

import pykvgraph as kvg
from pykvgraph.engine.step_times import _step, learn_times
from pykvgraph.plan.time_model import cells_of_run

SIZES = (1, 3, 6, 12, 24, 48, 96, 200)
DEPTHS = (0, 700, 1500, 3000)
N_TIMES = 3


def judge(path: str) -> None:
    """Prints each prediction beside the median of three steps."""
    with kvg.Model(path, device="cpu") as model, kvg.Context(model, n_ctx=4096) as ctx:
        begin = time.perf_counter()
        times = learn_times(ctx).times
        learned = time.perf_counter() - begin
        recurs = any(group.kind == "state" for group in ctx.kv.groups)
        errors = []
        for depth in DEPTHS[:1] if recurs else DEPTHS:
            for n in SIZES:
                found = statistics.median(_step(ctx, depth, n) for _ in range(N_TIMES))
                predicted = times.seconds(n, cells_of_run(depth, n))
                errors.append(predicted / found - 1)
                shown = f"{1000 * found:8.2f} ms, predicted {1000 * predicted:8.2f}"
                print(f"  {n:4} tokens behind {depth:5} cells {shown}, {100 * errors[-1]:+.0f} %", flush=True)
        median = 100 * statistics.median(map(abs, errors))
        print(f"{model.arch}: learned in {learned:.1f} s, median error {median:.1f} %", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        judge(name)

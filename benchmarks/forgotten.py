"""How fast a text goes on when most of its cells are forgotten, beside a text that never had more.

    python benchmarks/forgotten.py MODEL [--tokens 8192] [--cells 2048]

Tokens that keydiff forgets are holes among those that stay, until defrag() closes up. Medians by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import pykvgraph as kvg

N_SAID = 32  # tokens that are timed together
N_ROUNDS = 7


def decoder(ctx: kvg.Context, n_vocab: int) -> Callable[[], float]:
    """Decodes some tokens one by one behind a context's text, which it leaves as it was; ms for a token."""
    ids = np.random.default_rng(1).integers(3, n_vocab, N_SAID)

    def decode() -> float:
        begin = ctx.kv.seq_pos_max(0) + 1
        batch = kvg.Batch()
        start = time.perf_counter()
        for i, token in enumerate(ids.tolist()):
            batch.clear()
            batch.add(token, begin + i, logits=True)
            ctx.decode(batch)
        elapsed = time.perf_counter() - start
        ctx.kv.seq_rm(0, begin, -1)
        return 1000 * elapsed / N_SAID

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument("--cells", type=int, default=2048, help="that are left of it")
    parser.add_argument("-t", type=int, default=None, help="threads")
    args = parser.parse_args()
    with kvg.Model(args.model, device="cpu") as model:
        ids = np.random.default_rng(0).integers(3, model.n_vocab, args.tokens).tolist()
        contexts = {}
        for name, n in ((f"{args.cells} cells", args.cells), (f"{args.tokens} cells", args.tokens)):
            contexts[name] = ctx = kvg.Context(model, n_ctx=args.tokens + 256, n_threads=args.t)
            kvg.Sequence(ctx).set(ids[:n])
        for policy in ("keydiff", "keydiff, closed up"):
            name = f"{args.cells} of {args.tokens} cells by {policy}"
            contexts[name] = ctx = kvg.Context(model, n_ctx=args.tokens + 256, n_threads=args.t)
            text = kvg.Sequence(ctx)
            text.set(ids)
            text.forget(args.tokens - args.cells)
            if "closed" in policy:
                ctx.kv.defrag()
        times: dict[str, list[float]] = {name: [] for name in contexts}
        for _ in range(N_ROUNDS):
            for name, ctx in contexts.items():
                times[name].append(decoder(ctx, model.n_vocab)())
        least = statistics.median(times[f"{args.cells} cells"])
        for name, found in times.items():
            median = statistics.median(found)
            print(f"{name:40} {median:7.2f} ms a token, {median / least:.2f} times")
            contexts[name].close()


if __name__ == "__main__":
    main()

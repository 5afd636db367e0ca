"""A chat that is 50 contexts long: its speed beside a chat that begins anew with each context, and memory.

    python benchmarks/long_chat.py                       # the embedded model that talks, and stories260K
    python benchmarks/long_chat.py -m model.gguf -c 4096

A full context is between half and all of its cells long, and one that begins anew between none and all:
attention reads more in the first. So the table has the time of a token by the number of cells, too: at the
same number, what is left is the cost of having been shifted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path

from shapes import STORIES

import pykvgraph as kvg
from pykvgraph.chat import Conversation
from pykvgraph.models import embedded_model

N_CONTEXTS = 50
N_BINS = 8
Times = dict[int, list[float]]  # by the eighth of the cells that the text has


def main() -> None:
    args = parse_arguments()
    for path in [args.m] if args.m else [str(embedded_model("dialogue")), str(STORIES)]:
        print(f"{Path(path).name}, {args.c} cells")
        with kvg.Model(path, device="cpu") as model:
            compare(model, args.c, args.t)


def compare(model: kvg.Model, n_ctx: int, n_threads: int | None) -> None:
    """Both chats, a context of each by turns."""

    def context() -> kvg.Context:
        return kvg.Context(model, n_ctx=n_ctx, n_threads=n_threads)

    with context() as long_ctx, context() as ctx:
        long = Conversation(long_ctx, system="Be kind.")
        speed_of_context(long, n_ctx, 0, defaultdict(list))
        new_times: Times = defaultdict(list)
        long_times: Times = defaultdict(list)
        ratios, memory = [], []
        for k in range(1, N_CONTEXTS + 1):
            ctx.reset()
            new = speed_of_context(Conversation(ctx, system="Be kind."), n_ctx, 100 * k, new_times)
            ratios.append(speed_of_context(long, n_ctx, 100 * k, long_times) / new)
            memory.append(resident())
    print("microseconds a token, by how full the cache is: begun anew, in the long chat, ratio of speeds")
    for eighth in sorted(new_times.keys() & long_times.keys()):
        new, old = (1e6 * statistics.median(times[eighth]) for times in (new_times, long_times))
        print(f"{eighth}/{N_BINS}  {new:6.0f} {old:6.0f}  {new / old:.2f}")
    print(f"of the first context's speed, all in all: {statistics.median(ratios):.3f}")
    print(f"MiB after 1, 25 and 50 contexts: {memory[0]:.1f} {memory[24]:.1f} {memory[-1]:.1f}\n")


def speed_of_context(chat: Conversation, n_ctx: int, seed: int, times: Times) -> float:
    """Tokens a second, until as many were read and said as there are cells."""
    n = n_asked = 0
    begin = time.perf_counter()
    while n < n_ctx:
        params = kvg.SamplingParams(max_tokens=80, temperature=0.8, seed=seed + n_asked)
        before = time.perf_counter()
        pieces = chat.ask(f"Tell me of number {n_asked}.", params)
        for i, _ in enumerate(pieces):
            now = time.perf_counter()
            if i:
                times[len(chat.ids) * N_BINS // n_ctx].append(now - before)
            before = now
            n += 1
        assert chat.change is not None
        n += chat.change.n_decoded
        n_asked += 1
    return n / (time.perf_counter() - begin)


def resident() -> float:
    """MiB of memory that the process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", metavar="MODEL", help="default: two small ones")
    parser.add_argument("-c", type=int, default=512, help="cells (default: 512)")
    parser.add_argument("-t", type=int, help="CPU threads (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

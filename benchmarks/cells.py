"""What the bookkeeping of cells costs from Python: holds, positions of many sequences, decoding among them.

python benchmarks/cells.py                # a minute; a table on stdout, the best of several rounds
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pykvgraph as kvg

MODEL = Path(__file__).parent.parent / "tests" / "data" / "stories260K.gguf"
N_CELLS, N_SEQ, N_HOLDS, BLOCK, PER_RUN = 65_536, 256, 100_000, 32, 256
ROUNDS = 7


def best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest round: others on the machine only make one slower."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def filled(model: kvg.Model, n_tokens: int, seqs: range, n_seq_max: int, n_ctx: int = N_CELLS) -> kvg.Context:
    """So many tokens in each of these sequences."""
    ctx = kvg.Context(model, n_ctx=n_ctx, n_seq_max=n_seq_max, n_threads=1, defrag_threshold=-1)
    batch = kvg.Batch()
    for seq in seqs:
        for begin in range(0, n_tokens, ctx.n_batch):
            batch.clear()
            batch.extend([5] * min(ctx.n_batch, n_tokens - begin), begin, (seq,))
            ctx.decode(batch)
    return ctx


def show(what: str, seconds: float) -> None:
    print(f"{what:<68} {seconds * 1e6:>10.2f} us")


def positions(model: kvg.Model) -> None:
    kv = filled(model, N_CELLS // N_SEQ, range(N_SEQ), N_SEQ).kv

    def each() -> list[int]:
        assert kv.n_used  # a call, after which the positions are asked for again
        return [kv.seq_pos_max(seq) for seq in range(N_SEQ)]

    def after_removal() -> list[int]:
        kv.seq_rm(-1, kv.seq_pos_max(0), -1)
        return [kv.seq_pos_max(seq) for seq in range(N_SEQ)]

    show("seq_pos_max of 256 sequences, 65,536 cells, in 256 calls", best(each))
    show("the same by seq_bounds()", best(kv.seq_bounds))
    show("seq_rm(-1) of the last position of each, then the same in 256 calls", best(after_removal))
    show("cells().pos of 65,536 cells and 256 sequences", best(lambda: kv.cells().pos))
    show("cells().seq", best(lambda: kv.cells().seq))


def fastest(work: Callable[[kvg.Hold], object], held: list[kvg.Hold], after: Callable[[], object]) -> float:
    """Seconds for one hold, in the fastest of the runs of PER_RUN."""
    times = []
    for first in range(0, len(held) - PER_RUN + 1, PER_RUN):
        run = held[first : first + PER_RUN]
        begin = time.perf_counter()
        for hold in run:
            work(hold)
        times.append(time.perf_counter() - begin)
        after()
    return min(times) / PER_RUN


def holds(model: kvg.Model) -> None:
    kv = filled(model, PER_RUN * BLOCK, range(1), N_SEQ, n_ctx=PER_RUN * BLOCK + 64).kv
    held: list[kvg.Hold] = []
    times = []
    while len(held) < N_HOLDS:
        begin = time.perf_counter()
        held += [kv.hold(0, i * BLOCK, (i + 1) * BLOCK) for i in range(PER_RUN)]
        times.append(time.perf_counter() - begin)
    show(f"hold of {BLOCK} cells, one of {len(held):,}", min(times) / PER_RUN)
    attach = fastest(lambda hold: kv.attach(hold, 1), held, lambda: kv.seq_rm(1, 0, -1))
    show("attach", attach)
    kv.seq_rm(0, 0, BLOCK)
    del held[::PER_RUN]  # all that hold the first cells, which become holes
    kv.defrag("fill")
    show("defrag that moves 32 cells, each held by all", best(kv.update, 1))
    assert kv.n_kv == kv.n_used == PER_RUN * BLOCK - BLOCK
    half = len(held) // 2
    show("release", fastest(lambda hold: hold.release(), held[:half], lambda: None))
    collected = held[half:]
    del held
    times = []
    while len(collected) >= PER_RUN:
        begin = time.perf_counter()
        del collected[-PER_RUN:]
        times.append(time.perf_counter() - begin)
    show("release by the last reference", min(times) / PER_RUN)
    del collected
    kv.seq_rm(0, 0, -1)
    assert kv.n_used == 0


def decoding(model: kvg.Model) -> None:
    contexts = {n: filled(model, 4096, range(1), n, n_ctx=8192) for n in (1, N_SEQ)}
    fastest = dict.fromkeys(contexts, float("inf"))
    for _ in range(200):  # by turns, so that what else the machine does meets both
        for n, ctx in contexts.items():
            fastest[n] = min(fastest[n], best(partial(ctx.append, 5), 5))
    for n, seconds in fastest.items():
        show(f"append one token at 4,096 positions, n_seq_max={n}", seconds)


if __name__ == "__main__":
    with kvg.Model(sys.argv[1] if len(sys.argv) > 1 else MODEL) as opened:
        positions(opened)
        holds(opened)
        decoding(opened)

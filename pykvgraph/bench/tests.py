"""The tests of the bench: how each one prepares the cache, what it measures, and in which unit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pykvgraph.bench.engines import Ids, MeasuredEngine, OurEngine
from pykvgraph.context.context_shift import N_KEEP


@dataclass(frozen=True)
class Test:
    """A test. run: gets an engine with an empty cache, and returns the seconds of the part that is measured.

    amount: tokens or cells in that time. unit: of the result, amount per second or microseconds per token.
    kind: "pp" or "tg" where llama-bench has this test, too.
    """

    name: str
    depth: int
    amount: int
    unit: str
    n_cells: int
    run: Callable[[MeasuredEngine], float]
    n_seq: int = 1
    has_other: bool = True  # whether libllama can do it
    kind: Literal["", "pp", "tg"] = ""


def random_ids(engine: MeasuredEngine, n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, engine.n_vocab, n, dtype=np.int32)


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def decode_on(engine: MeasuredEngine, n_tokens: int, pos0: int) -> None:
    """Decodes one token after another in sequence 0."""
    for i, token in enumerate(random_ids(engine, n_tokens, 1).tolist()):
        engine.step([token], [pos0 + i])


def prompt(n_tokens: int, depth: int) -> Test:
    """pp: decodes n_tokens at once, after `depth` tokens."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)
        ids = random_ids(engine, n_tokens)
        return timed(lambda: engine.prefill(ids, depth))

    return Test(f"pp{n_tokens}", depth, n_tokens, "t/s", depth + n_tokens, run, kind="pp")


def generation(n_tokens: int, depth: int) -> Test:
    """tg: decodes n_tokens one by one, after `depth` tokens."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)
        return timed(lambda: decode_on(engine, n_tokens, depth))

    return Test(f"tg{n_tokens}", depth, n_tokens, "t/s", depth + n_tokens, run, kind="tg")


def generated(n_tokens: int, depth: int) -> Test:
    """The engine's own token loop; for libllama this is llama_decode only."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)
        start = time.perf_counter()
        count = engine.generate(n_tokens, depth)
        return (time.perf_counter() - start) * n_tokens / count  # the text may end before n_tokens

    return Test(f"generate {n_tokens}", depth, n_tokens, "t/s", depth + n_tokens, run)


def overhead(n_tokens: int, depth: int) -> Test:
    """The time that the same loop spends outside the decode graph."""

    def run(engine: MeasuredEngine) -> float:
        assert isinstance(engine, OurEngine)
        fill(engine, depth)
        in_graph = -engine.context.graph_seconds
        start = time.perf_counter()
        count = engine.generate(n_tokens, depth)
        seconds = time.perf_counter() - start
        in_graph += engine.context.graph_seconds
        return (seconds - in_graph) * n_tokens / count

    return Test("overhead", depth, n_tokens, "us/t", depth + n_tokens, run, has_other=False)


def first_after_shift(depth: int) -> Test:
    """The first token after half of the text was discarded, including K-shift and defrag."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)

        def first() -> None:
            pos = discard_half(engine, depth)
            engine.defrag("fill")
            decode_on(engine, 1, pos)

        return timed(first)

    return Test("shift", depth, 1, "t/s", depth + 1, run)


def after_shift(n_tokens: int, depth: int) -> Test:
    """Decoding after half of the text was discarded. The first token is not measured."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)
        pos = discard_half(engine, depth)
        engine.defrag("fill")
        decode_on(engine, 1, pos)
        return timed(lambda: decode_on(engine, n_tokens, pos + 1))

    return Test(f"tg{n_tokens} after shift", depth, n_tokens, "t/s", depth + n_tokens + 1, run)


def holes(n_tokens: int, depth: int, *, defrag: bool) -> Test:
    """Decoding while every other cell is a hole; with `defrag`, after defrag has filled the holes."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)
        for pos in range(0, depth - 1, 2):  # the last position stays: libllama refuses a gap at the end
            engine.seq_rm(0, pos, pos + 1)
        if defrag:
            engine.defrag("fill")
        decode_on(engine, 1, depth)
        return timed(lambda: decode_on(engine, n_tokens, depth + 1))

    name = "holes, defrag" if defrag else "holes"
    return Test(f"tg{n_tokens} {name}", depth, n_tokens, "t/s", depth + n_tokens + 1, run)


def compaction(depth: int, *, scattered: bool) -> Test:
    """Defrag when half of the cells are holes: one run, or with `scattered` every other cell."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)
        if scattered:
            for pos in range(0, depth, 2):
                engine.seq_rm(0, pos, pos + 1)
        else:
            engine.seq_rm(0, 0, depth // 2)
        return timed(lambda: engine.defrag("fill"))

    n_moved = depth // 4 if scattered else depth // 2
    name = "defrag cells" if scattered else "defrag run"
    return Test(name, depth, n_moved, "cells/s", depth, run, has_other=False)


def copied(depth: int, n_threads: int) -> Test:
    """memcpy of as many bytes as these cells have, to compare with moving the cells."""

    def run(engine: MeasuredEngine) -> float:
        assert isinstance(engine, OurEngine)
        fill(engine, depth)
        n_bytes = len(engine.save()) // n_threads
        source, target = np.zeros((2, n_threads, n_bytes), np.uint8)
        target[:] = 1  # so that the memory of both is mapped
        source[:] = 2
        with ThreadPoolExecutor(n_threads) as threads:
            list(threads.map(len, source))  # so that the threads have started
            return timed(lambda: list(threads.map(np.copyto, target, source)))

    name = f"memcpy {n_threads} threads" if n_threads > 1 else "memcpy"
    return Test(name, depth, depth, "cells/s", depth, run, has_other=False)


def state(depth: int, *, load: bool) -> Test:
    """Saves a sequence to memory, or with `load` loads it."""

    def run(engine: MeasuredEngine) -> float:
        fill(engine, depth)
        if not load:
            return timed(engine.save)
        saved = engine.save()
        return timed(lambda: engine.load(saved))

    return Test("state load" if load else "state save", depth, depth, "cells/s", depth, run)


def extra_tests(name: str, n_tokens: int, depth: int) -> list[Test]:
    """The tests of a name that `--cache` of the command line takes."""
    return {
        "shift": lambda: [
            first_after_shift(depth),
            after_shift(n_tokens, depth),
            generation(n_tokens, depth - n_discarded(depth) + 1),  # as many tokens, in a fresh cache
        ],
        "holes": lambda: [holes(n_tokens, depth, defrag=False), holes(n_tokens, depth, defrag=True)],
        "defrag": lambda: [
            compaction(depth, scattered=False),
            compaction(depth, scattered=True),
            copied(depth, 2),
        ],
        "state": lambda: [state(depth, load=False), state(depth, load=True), copied(depth, 1)],
        "overhead": lambda: [generated(n_tokens, depth), overhead(n_tokens, depth)],
        "seqs": lambda: [
            sequences(8, max(1, n_tokens // 8), depth),
            sequences(32, max(1, n_tokens // 32), depth),
        ],
    }[name]()


EXTRA_TESTS = ("shift", "holes", "defrag", "state", "seqs", "overhead")


def sequences(n_seq: int, n_steps: int, depth: int) -> Test:
    """Decoding several sequences of unequal length together, after half of their cells were removed and sort.

    The second sequence is twice as long as the first, the third three times, and so on. Together they have
    `depth` tokens.
    """
    lengths = [max(3, depth * 2 * (i + 1) // (n_seq * (n_seq + 1))) for i in range(n_seq)]

    def run(engine: MeasuredEngine) -> float:
        for seq, length in enumerate(lengths):
            engine.prefill(random_ids(engine, length, seq), 0, seq)
            for pos in range(1, length - 1, 2):
                engine.seq_rm(seq, pos, pos + 1)
        engine.defrag("sort")
        ids = random_ids(engine, n_seq).tolist()

        def steps() -> None:
            for i in range(n_steps):
                engine.step(ids, [length + 1 + i for length in lengths])

        engine.step(ids, lengths)
        return timed(steps)

    return Test(f"seqs {n_seq}", depth, n_seq * n_steps, "t/s", 2 * depth, run, n_seq)


def fill(engine: MeasuredEngine, depth: int) -> None:
    """Fills sequence 0: decodes the tokens the first time, and later loads them, which is much faster.

    Cells whose types fall with age can't be saved: the tokens are decoded each time.
    """
    if not depth:
        return
    if engine.filled is not None:
        engine.load(engine.filled)
        return
    engine.prefill(random_ids(engine, depth, 2), 0)
    if not (isinstance(engine, OurEngine) and engine.context.kv.ages):
        engine.filled = engine.save()


def discard_half(engine: MeasuredEngine, depth: int) -> int:
    """Discards as ContextShift does; returns the next position."""
    n_keep, n_discard = min(N_KEEP, depth // 2), n_discarded(depth)
    engine.seq_rm(0, n_keep, n_keep + n_discard)
    engine.seq_add(0, n_keep + n_discard, -1, -n_discard)
    return depth - n_discard


def n_discarded(depth: int) -> int:
    return (depth - min(N_KEEP, depth // 2)) // 2

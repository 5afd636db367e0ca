"""What the engine's Python costs: seconds for each sequence and step, and a lookup among many blocks.

    python benchmarks/engine_overhead.py

16 requests talk at once on stories260K, whose graphs take little. What a step takes beside its graph is the
work of the engine, of the batch and of the cells, in Python and in C++.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array

from shapes import STORIES

import pykvgraph as kvg
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex

N_TALKERS = 16
N_STEPS = 200
N_BLOCKS = 100_000
N_PROMPT = 20_000


def seconds_per_step(model: kvg.Model, n_talkers: int, prefix_cache: bool) -> float:
    """The median step of so many greedy talkers, less its graph."""
    params = kvg.SamplingParams(max_tokens=N_STEPS + 10, temperature=0)
    took = []
    with kvg.Engine(
        model, n_ctx=8192, n_seq_max=n_talkers, background=False, prefix_cache=prefix_cache, n_threads=1
    ) as engine:
        requests = [engine.submit([1, 300 + n], params) for n in range(n_talkers)]
        for _ in range(N_STEPS):
            begin, graph = time.perf_counter(), engine.context.graph_seconds
            engine.step()
            took.append(time.perf_counter() - begin - (engine.context.graph_seconds - graph))
        for request in requests:
            request.cancel()
    return statistics.median(took[5:])


def seconds_per_lookup(model: kvg.Model, n_prompt: int) -> float:
    """match() of a prompt of which everything is known, among N_BLOCKS blocks of other texts."""
    with kvg.Context(model, n_ctx=32768, n_batch=512, n_ubatch=512) as ctx:
        index = PrefixIndex(ctx.kv)
        batch = kvg.Batch()
        batch.extend([1] * 512, 0)
        ctx.decode(batch)
        for n in range(N_BLOCKS * block.N_TOKENS // 512 + 1):  # the cells are the same: a lookup reads none
            ids = array("i", [n, *range(511)])
            index.unpin(index.extend(index.attach(index.find(array("i"), 0), 0), ids, 512, 0))
        ctx.reset()
        prompt = array("i", range(n_prompt))
        last = index.attach(index.find(array("i"), 0), 0)
        for begin in range(0, n_prompt, 512):
            batch.clear()
            batch.extend([1] * min(512, n_prompt - begin), begin)
            ctx.decode(batch)
        index.extend(last, prompt, n_prompt, 0)
        took = []
        for _ in range(9):
            start = time.perf_counter()
            found = index.match(prompt)
            took.append(time.perf_counter() - start)
            assert found.n >= n_prompt // block.N_TOKENS * block.N_TOKENS
        return statistics.median(took)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with kvg.Model(STORIES, device="cpu") as model:
        for n_talkers in (1, N_TALKERS):
            for prefix_cache in (False, True):
                step = seconds_per_step(model, n_talkers, prefix_cache)
                shared = "with the index" if prefix_cache else "without it"
                print(f"{n_talkers:2} talkers, {shared}: {step / n_talkers * 1e6:.1f} us a sequence and step")
        for n_prompt in (2_000, N_PROMPT):
            took = seconds_per_lookup(model, n_prompt)
            print(f"a prompt of {n_prompt} tokens among {N_BLOCKS} blocks is found in {took * 1e6:.0f} us")


if __name__ == "__main__":
    main()

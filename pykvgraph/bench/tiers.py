"""What it costs where K and V are: on the device, in host memory for it, in host memory for the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.context.trace import Span, take_spans
from pykvgraph.errors import DeviceError, UnsupportedError
from pykvgraph.model.model import Model

HOST = "-kvt host"
# of Context, by the name that is printed
ARGUMENTS: dict[str, Mapping[str, Any]] = {
    "device": {"kv_tier": "device", "offload_kqv": True},
    HOST: {"kv_tier": "host", "offload_kqv": True},
    "-nkvo": {"kv_tier": "device", "offload_kqv": False},
}
N_GENERATED = 32


@dataclass(frozen=True)
class TierRun:
    """A prompt and N_GENERATED tokens behind it."""

    prompt_seconds: float
    token_seconds: float  # of each token
    cache_bytes: int  # of K and V on devices, the CPU is none
    compute_bytes: int  # of graphs there
    spans: Sequence[Span]  # of one token more; empty where nothing is copied


@dataclass(frozen=True)
class TierSpeed:
    """Medians of runs."""

    depth: int
    tier: str
    prompt: float  # tokens/s
    generation: float
    cache_bytes: int
    compute_bytes: int


def run_tier(model: Model, depth: int, tier: Mapping[str, Any], sizes: Mapping[str, Any]) -> TierRun | None:
    """tier, sizes: Context's arguments. None: the device has no room.

    The same prompt comes before, not measured. Raises DeviceError when the device fails later, and what
    Context and decode() raise else.
    """
    try:
        ctx = Context(model, **{**sizes, "n_ctx": depth + N_GENERATED + 1, **tier})
    except DeviceError:
        return None
    with ctx:
        decode_prompt(ctx, depth)
        ctx.append(0)
        ctx.reset()
        begin = time.perf_counter()
        decode_prompt(ctx, depth)
        middle = time.perf_counter()
        for token in range(N_GENERATED):
            ctx.append(token)
        end = time.perf_counter()
        _take_spans(ctx)  # from now on they are noted, which takes time
        ctx.append(0)
        there = [part for part in ctx.devices if part.device != "CPU"]
        return TierRun(
            middle - begin,
            (end - middle) / N_GENERATED,
            sum(part.cache_bytes for part in there),
            sum(part.compute_bytes for part in there),
            _take_spans(ctx),
        )


def _take_spans(ctx: Context) -> list[Span]:
    try:
        return ctx._handle.call(take_spans)
    except UnsupportedError:  # nothing is copied
        return []


def decode_prompt(ctx: Context, depth: int) -> None:
    for batch in prompt_batches(ctx, depth):
        ctx.decode(batch)


def prompt_batches(ctx: Context, depth: int) -> Iterator[Batch]:
    """Random tokens of sequence 0; the last one is an output."""
    ids = np.random.default_rng(0).integers(0, ctx.model.n_vocab, depth)
    for begin in range(0, depth, ctx.n_batch):
        part = ids[begin : begin + ctx.n_batch]
        batch = Batch()
        batch.extend(part, begin, logits="last" if begin + len(part) == depth else False)
        yield batch


def measure_tiers(
    model: Model,
    depth: int,
    n_repetitions: int,
    sizes: Mapping[str, Any],
    tick: Callable[[], None],
    tiers: Mapping[str, Mapping[str, Any]] = ARGUMENTS,
) -> tuple[list[TierSpeed], list[Span]]:
    """Each tier by turns, where there is room for it; and the spans of one token with HOST.

    tick: called after each run. Raises as run_tier().
    """
    runs: dict[str, list[TierRun]] = {tier: [] for tier in tiers}
    for _ in range(n_repetitions):
        for tier, done in runs.items():
            run = run_tier(model, depth, tiers[tier], sizes)
            done += [run] if run else []
            tick()
    speeds = [
        TierSpeed(
            depth,
            tier,
            depth / statistics.median(run.prompt_seconds for run in done),
            1 / statistics.median(run.token_seconds for run in done),
            max(run.cache_bytes for run in done),
            max(run.compute_bytes for run in done),
        )
        for tier, done in runs.items()
        if done
    ]
    hosted = runs.get(HOST)
    return speeds, list(hosted[-1].spans) if hosted else []

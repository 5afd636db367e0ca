"""Measures how long steps of a model last on this machine, in about a second, and remembers it."""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any, NamedTuple

import numpy as np

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.download.cache_file import recall, remember
from pykvgraph.kv_cache.reserved_cells import Place
from pykvgraph.model.device import devices, library_info
from pykvgraph.plan.time_model import StepLine, StepSample, TimeModel, cells_of_run

_FILE = "times.json"
_MOST_KNOWN = 256  # models, with their devices and settings
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens
_DEPTH = 2048  # cells before them
_SECONDS = 1.5
_MOST_REPEATS = 7
_LONG = 0.1  # seconds of a step: none of twice as many tokens is measured
_NEEDED = 16  # tokens: so many are measured, whatever they take
_STEADY = 1.5  # how much longer a step may last when it is measured again
_PIECE = 64  # cells that are written at a time


class Learned(NamedTuple):
    """is_steady: steps of one token took about the same time again; else other programs ran beside them."""

    times: TimeModel
    samples: list[StepSample]
    is_steady: bool


def learn_times(ctx: Context) -> Learned:
    """How long micro-batches of this context last, and what was measured. Its cache is emptied.

    Steps of 1 to 128 tokens, or of fewer where they take long, are measured in an empty cache, and behind
    2048 cells or as many as there are. These are filled with zeros, where no layer is recurrent; else steps
    are measured in the empty cache only. It takes about a second, and longer where a token takes over 10 ms.

    Raises InvalidArgumentError when n_ubatch, n_batch or half of n_ctx is under 16, and what decode() raises.
    """
    end = time.perf_counter() + _SECONDS
    most = min(ctx.n_ubatch, ctx.n_batch, ctx.n_ctx // 2)
    depth = min(_DEPTH, ctx.n_ctx - min(most, _SIZES[-1]))
    depths = [0] if any(group.kind == "state" for group in ctx.kv.groups) else [0, depth]
    _step(ctx, 0, min(most, _NEEDED))  # the first one makes what the others use
    least: dict[tuple[int, int], float] = {}  # what else runs on the machine only makes them longer
    for n in (n for n in _SIZES if n <= most):
        if n > _NEEDED and least[n // 2, 0] > _LONG:
            break
        least.update({(n, at): _step(ctx, at, n) for at in depths})
    singles = sorted(_step(ctx, 0, 1) for _ in range(3))
    least[1, 0] = min(least[1, 0], singles[0])
    for _ in range(_MOST_REPEATS):
        for (n, at), before in least.items():
            if time.perf_counter() + before < end:
                least[n, at] = min(before, _step(ctx, at, n))
    samples = [StepSample(n, cells_of_run(at, n), seconds) for (n, at), seconds in least.items()]
    return Learned(TimeModel.fit(samples), samples, singles[1] <= _STEADY * least[1, 0])


def times_of(ctx: Context) -> TimeModel:
    """learn_times(), or what it found for this file, these devices and settings in an earlier run.

    It is kept in times.json in the cache directory (XDG_CACHE_HOME), unless the machine was busy.
    """
    known, key = recall(_FILE), _key(ctx)
    found = _model_of(known.get(key))
    if found is None:
        found, _, is_steady = learn_times(ctx)
        known.pop(key, None)
        kept = dict(list(known.items())[1 - _MOST_KNOWN :])
        if is_steady:
            remember(_FILE, {**kept, key: list(found.coefficients)})
    return found


def _key(ctx: Context) -> str:
    """What the times depend on: the file, the devices, the settings, the libraries."""
    there = {each.name: each.description for each in devices()}
    settings = [ctx.type_k, ctx.type_v, ctx.flash_attn, ctx.offload_kqv, ctx.n_threads, ctx.n_threads_batch]
    if ctx.kv_tier != "device":
        settings += [ctx.kv_tier, ctx.device_layers]
    info = library_info()
    described = [
        ctx.model._fingerprint().hex(),
        [(name, there.get(name)) for name in ctx.model.layer_devices],
        settings,
        min(ctx.n_ubatch, _SIZES[-1]),
        info.version,
        info.ggml_version_running,
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _model_of(found: Any) -> TimeModel | None:
    """The model that somebody wrote down, if it can be one."""
    if not isinstance(found, list) or len(found) != 6:
        return None
    if not all(type(x) in (int, float) and math.isfinite(x) and 0 <= x <= 1e6 for x in found):
        return None
    few, many = StepLine(*map(float, found[:3])), StepLine(*map(float, found[3:]))
    return TimeModel(few, many) if few.seconds(1, 1) > 0 and many.seconds(16, 16) > 0 else None


def _step(ctx: Context, depth: int, n: int) -> float:
    """Seconds of a decode of n tokens behind `depth` cells; the cache is empty again."""
    try:
        if depth:
            _fill(ctx, depth)
        batch = Batch()
        batch.extend(np.arange(n) % ctx.model.n_vocab, depth, (0,), "last")
        begin = time.perf_counter()
        ctx.decode(batch)
        return time.perf_counter() - begin
    finally:
        ctx.reset()


def _fill(ctx: Context, n: int) -> None:
    """Sequence 0 gets n cells of zeros; of groups with a window, those that the next token sees."""
    groups = ctx.kv.groups
    if ctx.kv.ages:  # nothing but decodes puts cells there
        for first in range(0, n, ctx.n_batch):
            batch = Batch()
            batch.extend(np.arange(min(ctx.n_batch, n - first)) % ctx.model.n_vocab, first, (0,), False)
            ctx.decode(batch)
        return
    seen = [range(max(0, n - group.window) if group.window else 0, n) for group in groups]
    with ctx.kv.reserve([Place(positions) for positions in seen]) as incoming:
        for index, (group, positions) in enumerate(zip(groups, seen, strict=True)):
            for first in range(0, len(positions), _PIECE):
                cells = range(first, min(first + _PIECE, len(positions)))
                rows = np.zeros(len(cells) * group.cell_bytes, np.uint8)
                incoming.write(index, range(len(group.layers)), cells, rows)
        incoming.show(0)

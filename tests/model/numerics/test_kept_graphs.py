"""Graphs of few tokens are kept: batch sizes that come back build nothing, and compute what they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engines import Logits, decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.kept_graphs import grow_graphs
from support.models import N_VOCAB

import pykvgraph as kvg

SIZES = [7, 8, 1, 7, 40, 8, 1, 40, 7, 3, 8]


def in_batches(ctx: kvg.Context, sizes: list[int], pos0: int = 0) -> Logits:
    ids = random_ids(sum(sizes), N_VOCAB)
    ends = np.cumsum(sizes)
    return np.concatenate(
        [decode(ctx, run_of(ids[end - n : end], pos0 + end - n)) for n, end in zip(sizes, ends, strict=True)]
    )


@pytest.fixture
def expected(small: kvg.Model) -> Logits:
    """One batch: a graph that nobody kept."""
    with open_context(small, n_ctx=256) as ctx:
        return in_batches(ctx, [sum(SIZES)])


def test_sizes_that_come_back(small: kvg.Model, expected: Logits) -> None:
    with open_context(small, n_ctx=256) as ctx:
        assert nmse(in_batches(ctx, SIZES), expected) <= 1e-6


def test_more_sizes_than_are_kept(small: kvg.Model) -> None:
    sizes = [*range(1, 20), *range(20, 0, -2), 5, 5, 6]
    with open_context(small, n_ctx=512) as ctx, open_context(small, n_ctx=512) as other:
        assert nmse(in_batches(ctx, sizes), in_batches(other, [sum(sizes)])) <= 1e-6


def test_nothing_is_built_again(small: kvg.Model) -> None:
    with open_context(small, n_ctx=256) as ctx:
        in_batches(ctx, [7, 8, 1, 40])
        with fault("build", 1):
            in_batches(ctx, [7, 8, 7, 1, 8, 40], 100)
            with pytest.raises(kvg.DeviceError):
                in_batches(ctx, [9], 200)


def test_without_memory_of_its_own(small: kvg.Model, expected: Logits) -> None:
    for countdown in range(1, 6):
        with open_context(small, n_ctx=256) as ctx, fault("alloc-kept", countdown):
            assert nmse(in_batches(ctx, SIZES), expected) <= 1e-6


def test_a_graph_that_failed_is_not_used_again(small: kvg.Model, expected: Logits) -> None:
    with open_context(small, n_ctx=256) as ctx:
        in_batches(ctx, [7, 8])
        with fault("compute", 1), pytest.raises(kvg.DeviceError):
            in_batches(ctx, [7], 15)
        ctx.reset()
        assert nmse(in_batches(ctx, SIZES), expected) <= 1e-6


def test_they_take_little_memory(small: kvg.Model) -> None:
    def compute_bytes() -> int:
        return sum(part.compute_bytes for part in ctx.devices)

    with open_context(small, n_ctx=1024, n_ubatch=64) as ctx:
        reserved = compute_bytes()
        in_batches(ctx, [32])
        of_one = compute_bytes() - reserved
        assert 0 < of_one < reserved
        for size in range(1, 33):
            in_batches(ctx, [size], 100 * size)
        assert compute_bytes() <= reserved + 8 * of_one


@pytest.mark.parametrize("sizes", [{}, {"n_ubatch": 24}, {"n_seq_max": 40}], ids=str)
def test_a_plan_has_them(small: kvg.Model, sizes: dict[str, int]) -> None:
    """Within 2% of what a context takes at its largest, when batches of all sizes make nothing grow."""
    options: dict[str, Any] = {"n_ctx": 1024, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, **sizes}
    planned = sum(part.compute_bytes for part in kvg.plan_memory(small.path, "cpu", **options))
    with open_context(small, **options) as ctx:
        fresh = sum(part.compute_bytes for part in ctx.devices)
        grow_graphs(ctx)
        most = sum(part.compute_bytes for part in ctx.devices)
        assert abs(planned - most) <= 0.02 * most
        assert fresh < 0.8 * most
        for size in [*range(1, 33), *range(32, 0, -1)]:
            ctx.reset()
            decode(ctx, run_of(random_ids(size, N_VOCAB)))
        grow_graphs(ctx)
        assert sum(part.compute_bytes for part in ctx.devices) == most

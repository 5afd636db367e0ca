"""Memory of models whose layers have windows: how many cells, how many bytes, and what is predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import open_context
from support.kept_graphs import grow_graphs
from support.models import WeightType

import pykvgraph as kvg

Architecture = Callable[[ArchSpec], Path]

SPECS = [
    ArchSpec("gemma2", 4, window=96),
    ArchSpec("gemma3", 6, window=40, period=6, weights=WeightType.Q8_0),
    ArchSpec("gpt-oss", 4, window=64, n_expert=4, scaling="yarn"),
    ArchSpec("gemma4", 6, window=64, period=3, head_dim_window=64, n_head_kv_window=4, n_embd_layer=32),
    ArchSpec("gemma4", 6, window=64, head_dim_window=16, n_shared=2, weights=WeightType.F16),
    ArchSpec("qwen3moe", 3, n_expert=8),
]
CONTEXTS: list[dict[str, Any]] = [
    {"n_ctx": 100, "n_batch": 64},
    {"n_ctx": 1000, "n_batch": 300, "n_ubatch": 100, "n_seq_max": 3, "checkpoint_cells": 50},
    {"n_ctx": 5000, "n_batch": 64, "type_k": "q8_0", "type_v": "q8_0"},
]


def cells_of(spec: ArchSpec, layer: int, options: dict[str, Any]) -> int:
    """As the design says: a window of each sequence, a batch, and what checkpoints may take."""
    n_ctx = int(options["n_ctx"])
    if options["swa_full"] or not spec.has_window(layer):
        return n_ctx
    n_windows = int(options.get("n_seq_max", 1)) * spec.window
    return min(n_ctx, n_windows + int(options["n_batch"]) + int(options.get("checkpoint_cells", 0)))


def bytes_of(spec: ArchSpec, options: dict[str, Any]) -> int:
    """K and V of all layers that have their own, in rows padded to 256 of them."""
    size = {"f16": 2.0, "q8_0": 34 / 32}[options.get("type_k", "f16")]
    total = 0.0
    for layer in range(spec.n_layer - spec.n_shared):
        head_dim, n_head_kv = spec.heads_of(layer)
        rows = -(-cells_of(spec, layer, options) // 256) * 256
        total += 2 * rows * n_head_kv * head_dim * size
    return int(total)


@pytest.mark.parametrize("swa_full", [False, True], ids=["bounded", "swa_full"])
@pytest.mark.parametrize("context", CONTEXTS, ids=lambda options: str(options["n_ctx"]))
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_memory(architecture: Architecture, spec: ArchSpec, context: dict[str, Any], swa_full: bool) -> None:
    path, options = architecture(spec), {**context, "swa_full": swa_full}
    if spec.head_dim_window == 16 and "type_k" in options:
        del options["type_k"], options["type_v"]  # half a block
    plan = kvg.plan_memory(path, where.device, n_threads=1, n_threads_batch=1, **options)
    with kvg.Model(path, device=where.device) as model, open_context(model, **options) as ctx:
        for group in ctx.kv.groups:
            assert {cells_of(spec, layer, options) for layer in group.layers} == {group.n_cells}
        assert ctx.kv.bytes == bytes_of(spec, options)
        grow_graphs(ctx)
        assert [part.device for part in plan] == [part.device for part in ctx.devices]
        for predicted, part in zip(plan, ctx.devices, strict=True):
            for name in ("weight_bytes", "cache_bytes", "compute_bytes"):
                there = getattr(part, name)
                assert abs(getattr(predicted, name) - there) <= 0.02 * there, (part.device, name)
        assert sum(part.cache_bytes for part in ctx.devices) == ctx.kv.bytes

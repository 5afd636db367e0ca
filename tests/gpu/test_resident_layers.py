"""K and V of some layers on the device, of the others in host memory (kv_tier="auto", resident_layers)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.architectures import ArchSpec
from support.engines import decode, open_context, random_ids, run_of
from support.every_op import OPTIONS, every_op, on_cpu, worst_step
from support.judge import nmse
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg
from pykvgraph.plan import fitting

pytestmark = pytest.mark.gpu

N_LAYER = 6
SPEC = ModelSpec(n_layer=N_LAYER, n_head=4, n_head_kv=2, head_dim=64)
WINDOWS = ArchSpec("gemma3", N_LAYER, window=24, period=3)


def cache_bytes(ctx: kvg.Context) -> int:
    return ctx.devices[0].cache_bytes


@pytest.mark.parametrize("n_resident", [1, 4])
def test_every_operation(device: str, model_file: Callable[[ModelSpec], Path], n_resident: int) -> None:
    path = model_file(SPEC)
    tier: dict[str, Any] = {"kv_tier": "host", "resident_layers": n_resident}
    with kvg.Model(path, device=device) as model:
        with open_context(model, **OPTIONS) as ctx:
            there = cache_bytes(ctx)
        with open_context(model, **tier, **OPTIONS) as ctx:
            assert worst_step(every_op(ctx), on_cpu(path, "f16")) <= 1e-3
            rows_of_two = min(2, N_LAYER - n_resident)  # device_layers
            assert cache_bytes(ctx) == there * (n_resident + rows_of_two) // N_LAYER
            planned = kvg.plan_memory(path, device, n_threads=1, n_threads_batch=1, **tier, **OPTIONS)
            assert [part.cache_bytes for part in planned] == [part.cache_bytes for part in ctx.devices]


def test_windows_stay_first(device: str, architecture: Callable[[ArchSpec], Path]) -> None:
    """Four layers of six have a window; with these on the device, the two others' rows take turns there."""
    path = architecture(WINDOWS)
    with kvg.Model(path, device=device) as model:
        sizes = []
        for n_resident in (0, 4, 6):
            with open_context(
                model, n_ctx=2000, n_batch=32, kv_tier="host", resident_layers=n_resident
            ) as ctx:
                groups = {group.kind: group for group in ctx.kv.groups}
                sizes.append(cache_bytes(ctx))
    window, full = groups["window"], groups["full"]
    n_rows = -(-window.n_cells // 256) * 256  # a device attends to spans of so many
    assert sizes[1] - sizes[0] == n_rows * window.cell_bytes
    assert sizes[2] > full.cell_bytes * full.n_cells


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_auto(
    device: str, model_file: Callable[[ModelSpec], Path], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """On a device with a share of what is needed: as many layers as fit, and the same logits."""
    path = model_file(dataclasses.replace(SPEC, n_layer=12))
    options: dict[str, Any] = {"n_ctx": 4096, "n_batch": 64, "n_ubatch": 64}
    ids = run_of(random_ids(64, N_VOCAB))
    with kvg.Model(path, device=device) as model:
        with open_context(model, **options) as ctx:
            expected = decode(ctx, ids)
        needed = taken(path, device, options)
        least = taken(path, device, {**options, "kv_tier": "host"})
        limit = int(least + share * (needed - least))
        told = [
            dataclasses.replace(info, memory_free=limit * 100 // 80 + 1) if info.type == "gpu" else info
            for info in kvg.devices()
        ]
        monkeypatch.setattr(fitting, "devices", lambda: told)
        with open_context(model, kv_tier="auto", **options) as ctx:
            assert ctx.kv_tier == "host"
            n_resident = ctx.resident_layers
            assert nmse(decode(ctx, ids), expected) <= 1e-6
    assert 0 < n_resident < 12
    tier = {**options, "kv_tier": "host"}
    assert taken(path, device, {**tier, "resident_layers": n_resident}) <= limit
    assert taken(path, device, {**tier, "resident_layers": n_resident + 1}) > limit


@pytest.mark.parametrize("margin", [0, 50])
def test_an_engine_leaves_its_own_margin(
    device: str, model_file: Callable[[ModelSpec], Path], monkeypatch: pytest.MonkeyPatch, margin: int
) -> None:
    path = model_file(dataclasses.replace(SPEC, n_layer=12))
    sizes: dict[str, Any] = {"n_ctx": 4096, "n_batch": 64, "n_ubatch": 64}
    least, needed = (taken(path, device, {**sizes, "kv_tier": tier}) for tier in ("host", "device"))
    limit = (least + needed) // 2
    told = [
        dataclasses.replace(info, memory_free=limit * 100 // (100 - margin) + 1)
        if info.type == "gpu"
        else info
        for info in kvg.devices()
    ]
    monkeypatch.setattr(fitting, "devices", lambda: told)
    with (
        kvg.Model(path, device=device) as model,
        kvg.Engine(
            model, kv_tier="auto", margin=margin, n_seq_max=1, n_threads=1, background=False, **sizes
        ) as engine,
    ):
        n_resident = engine.context.resident_layers
    tier = {**sizes, "kv_tier": "host"}
    assert taken(path, device, {**tier, "resident_layers": n_resident}) <= limit
    assert taken(path, device, {**tier, "resident_layers": n_resident + 1}) > limit


def test_auto_where_all_fits(device: str, model_file: Callable[[ModelSpec], Path]) -> None:
    with (
        kvg.Model(model_file(SPEC), device=device) as model,
        open_context(model, kv_tier="auto", n_ctx=256) as ctx,
    ):
        assert (ctx.kv_tier, ctx.resident_layers) == ("device", 0)


def taken(path: Path, device: str, options: dict[str, Any]) -> int:
    """Bytes on the device beside the weights."""
    part = kvg.plan_memory(path, device, n_threads=1, n_threads_batch=1, **options)[0]
    return part.cache_bytes + part.compute_bytes

"""Context(kv_tier="host") on a device: speed and memory beside cells there and -nkvo, with the bars.

A part of device.py, which runs it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from ggml_calls import bus_rate
from support.models import ModelSpec, WeightType, write_model  # device.py has told where

import pykvgraph as kvg
from pykvgraph.bench.tiers import HOST, TierSpeed, decode_prompt, measure_tiers
from pykvgraph.context.trace import Span

LARGE: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 3584}
SMALL: dict[str, Any] = {"n_layer": 8, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 256}
MIB = 1 << 20


def host_tier(device: str, models: Path, small: bool) -> dict[str, Any]:
    """Medians by turns. Devices that copy and compute at once must meet the bars; others needn't."""
    depth, repetitions = (128, 1) if small else (8192, 3)  # the CPU attends to all of it, with -nkvo
    path = write_model(ModelSpec(weights=WeightType.Q8_0, **(SMALL if small else LARGE)), models)
    with kvg.Model(path, device=device) as model:
        speeds, spans = measure_tiers(model, depth, repetitions, {}, lambda: None)
        found = {each.tier: each for each in speeds}
        report = {tier: figures(each) for tier, each in found.items()}
        n_bytes = sum(span.n_bytes for span in spans if span.track == "copy in")
        bus = bus_rate(device, max(n_bytes, 64 * MIB))
        report["bus"] = {"GB/s": bus / 1e9, "bytes for a token": n_bytes}
        report["bars"] = bars(found["device"], found[HOST], n_bytes / bus, spans)
        for name, values in report.items():
            print(f"{name}: {values}", flush=True)
        if not small:  # the memory of a software device is the machine's
            report["beyond the device"] = beyond(model, device, 4 * depth)
            print(f"beyond the device: {report['beyond the device']}", flush=True)
    return report


def figures(speed: TierSpeed) -> dict[str, float]:
    return {
        "prompt t/s": speed.prompt,
        "t/s": speed.generation,
        "K and V on the device, MiB": speed.cache_bytes / MIB,
        "graphs there, MiB": speed.compute_bytes / MIB,
    }


def bars(device: TierSpeed, host: TierSpeed, copying: float, spans: list[Span]) -> dict[str, Any]:
    """copying: seconds that the bus takes for a token's spans.

    "hidden" is the share of the shorter of copying and computing that took no time of its own: 1 when both
    ran at once, 0 when one came after the other.
    It says nothing where one takes next to nothing.
    """
    token, computing = 1 / host.generation, 1 / device.generation
    limit, share = 1.25 * max(computing, copying), host.prompt / device.prompt
    return {
        "seconds of a token": token,
        "computing": computing,
        "copying": copying,
        "hidden": (copying + computing - token) / min(copying, computing),
        "token <= 1.25 x the longer": {"limit": limit, "met": token <= limit},
        "prompt >= 0.75 of the device's": {"share": share, "met": share >= 0.75},
        "next layer's copy has begun": {"met": begun_before(spans)},
    }


def begun_before(spans: list[Span]) -> bool:
    """Whether each layer's rows are on their way before the layer before it is computed."""
    tracks: dict[str, dict[int, Span]] = {}
    for span in spans:
        tracks.setdefault(span.track, {})[span.layer] = span
    layers = sorted(tracks["compute"])
    return all(
        tracks["copy in"][after].begin <= tracks["compute"][layer].begin for layer, after in pairwise(layers)
    )


def beyond(model: kvg.Model, device: str, n_ctx: int) -> dict[str, Any]:
    """A context that the device has no room for: refused with cells there, complete with kv_tier="host"."""
    with fill_device(model, device, n_ctx):
        try:
            kvg.Context(model, n_ctx=n_ctx).close()
            return {"met": False, "why": f"{device} has room for {n_ctx} cells"}
        except kvg.DeviceError as refused:
            why = str(refused)
        with kvg.Context(model, n_ctx=n_ctx, kv_tier="host") as ctx:
            decode_prompt(ctx, n_ctx)
            return {"met": True, "cells": n_ctx, "decoded": ctx.kv.n_used, "with cells there": why}


def fill_device(model: kvg.Model, device: str, n_ctx: int) -> kvg.Context:
    """Leaves half of what n_ctx cells take there; kv_tier="host" needs less of it with 4 layers or more."""
    room = n_ctx * bytes_of_cell(model) // 2
    free = memory_of(device).memory_free
    return kvg.Context(model, n_ctx=(free - room) // bytes_of_cell(model), n_batch=1, n_ubatch=1)


def bytes_of_cell(model: kvg.Model) -> int:
    with kvg.Context(model, n_ctx=256) as ctx:
        return ctx.kv.bytes // ctx.kv.n_cells


def memory_of(device: str) -> kvg.DeviceInfo:
    return next(info for info in kvg.devices() if info.name == device)

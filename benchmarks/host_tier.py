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
from pykvgraph.lab.bench.tiers import HOST, TierSpeed, measure_tiers
from pykvgraph.trace import Span

LARGE: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 3584}
SMALL: dict[str, Any] = {"n_layer": 8, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 256}
MIB = 1 << 20


def host_tier(device: str, models: Path, small: bool) -> dict[str, Any]:
    """Medians by turns. Devices that copy and compute at once must meet the bars; others needn't."""
    depth, repetitions = (128, 1) if small else (32768, 5)
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

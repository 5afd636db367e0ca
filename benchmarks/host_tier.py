"""Context(kv_tier="host") on a device: speed and memory beside cells there and -nkvo, with the bars.

    python benchmarks/host_tier.py -dev Vulkan0 --small -r 5

writes benchmarks/results/host_tier.json. It is also a part of device.py, which runs it.

1. cells on the device, in host memory for it, and in host memory for the CPU
2. kv_tier="auto" where the device has room for 30, 60 and 90 % of what cells there need beyond the least
3. the bus alone, a device that is too small, and the bars
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # whose models and measurements these are

from ggml_calls import bus_rate  # noqa: E402
from shapes import machine  # noqa: E402
from support.models import ModelSpec, WeightType, write_model  # noqa: E402

import pykvgraph as kvg  # noqa: E402
from pykvgraph.bench.tiers import ARGUMENTS, HOST, TierSpeed, decode_prompt, measure_tiers  # noqa: E402
from pykvgraph.context.trace import Span  # noqa: E402
from pykvgraph.params.params import MARGIN  # noqa: E402
from pykvgraph.plan import fitting  # noqa: E402

LARGE: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 3584}
SMALL: dict[str, Any] = {"n_layer": 8, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 256}
SHARES = (0.3, 0.6, 0.9)
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-dev", required=True, help="a name that `pykvgraph info` lists")
    parser.add_argument("--small", action="store_true", help="small model and depth, for a software device")
    parser.add_argument("-r", type=int, default=0, help="repetitions (default: 3; small: 1)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "host_tier.json")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    found = host_tier(args.dev, args.models, args.small, args.r)
    command = f"python benchmarks/host_tier.py -dev {args.dev}{' --small' if args.small else ''} -r {args.r}"
    args.json.write_text(json.dumps({"command": command, "machine": machine(), **found}, indent=1) + "\n")


def host_tier(device: str, models: Path, small: bool, repetitions: int = 0) -> dict[str, Any]:
    """Medians by turns. Devices that copy and compute at once must meet the bars; others needn't."""
    repetitions = repetitions or (1 if small else 3)
    depth = 400 if small else 8192  # the CPU attends to all of it, with -nkvo
    path = write_model(ModelSpec(weights=WeightType.Q8_0, **(SMALL if small else LARGE)), models)
    with kvg.Model(path, device=device) as model:
        shares = {name_of(share): resident(model, device, depth, share) for share in SHARES}
        tiers = {**ARGUMENTS, **shares}
        speeds, spans = measure_tiers(model, depth, repetitions, {}, lambda: None, tiers)
        found = {each.tier: each for each in speeds}
        report: dict[str, Any] = {tier: figures(each) for tier, each in found.items()}
        for name, tier in shares.items():
            report[name]["resident layers"] = tier.get("resident_layers", model.n_layer)
        n_bytes = sum(span.n_bytes for span in spans if span.track == "copy in")
        bus = bus_rate(device, max(n_bytes, 64 * MIB))
        report["bus"] = {"GB/s": bus / 1e9, "bytes for a token": n_bytes, "pinned": pinned(model)}
        report["bars"] = bars(found, n_bytes / bus, spans)
        for name, values in report.items():
            print(f"{name}: {values}", flush=True)
        if not small:  # the memory of a software device is the machine's
            report["beyond the device"] = beyond(model, device, 4 * depth)
            print(f"beyond the device: {report['beyond the device']}", flush=True)
    return report


def name_of(share: float) -> str:
    return f"-kvt auto, {share:.0%}"


def resident(model: kvg.Model, device: str, n_ctx: int, share: float) -> Mapping[str, Any]:
    """What kv_tier="auto" decides where the device tells that it has so much of what all cells there need.

    0: as much as kv_tier="host" takes.
    """

    def taken(kv_tier: str) -> int:
        parts = kvg.plan_memory(model.path, device, n_ctx=n_ctx, kv_tier=kv_tier)
        return sum(part.cache_bytes + part.compute_bytes for part in parts if part.device == device)

    least = taken("host")
    limit = least + share * (taken("device") - least)
    free = int(limit * 100 / (100 - MARGIN)) + 1
    told = [replace(info, memory_free=free) if info.name == device else info for info in kvg.devices()]
    with (
        mock.patch.object(fitting, "devices", lambda: told),
        kvg.Context(model, n_ctx=n_ctx, kv_tier="auto") as ctx,
    ):
        return {"kv_tier": ctx.kv_tier, "resident_layers": ctx.resident_layers}


def pinned(model: kvg.Model) -> bool:
    with kvg.Context(model, n_ctx=256, kv_tier="host") as ctx:
        return ctx.devices[-1].pinned_bytes > 0


def figures(speed: TierSpeed) -> dict[str, float]:
    return {
        "prompt t/s": speed.prompt,
        "t/s": speed.generation,
        "K and V on the device, MiB": speed.cache_bytes / MIB,
        "graphs there, MiB": speed.compute_bytes / MIB,
    }


def bars(found: Mapping[str, TierSpeed], copying: float, spans: list[Span]) -> dict[str, Any]:
    """copying: seconds that the bus takes for a token's spans.

    "hidden" is the share of the shorter of copying and computing that took no time of its own: 1 when both
    ran at once, 0 when one came after the other.
    It says nothing where one takes next to nothing.
    """
    device, host = found["device"], found[HOST]
    token, computing = 1 / host.generation, 1 / device.generation
    limit, share = 1.25 * max(computing, copying), host.prompt / device.prompt
    rising = [host, *(found[name_of(share)] for share in SHARES), device]
    return {
        "seconds of a token": token,
        "computing": computing,
        "copying": copying,
        "hidden": (copying + computing - token) / min(copying, computing),
        "of the device's t/s": host.generation / device.generation,
        "token <= 1.25 x the longer": {"limit": limit, "met": token <= limit},
        "prompt >= 0.75 of the device's": {"share": share, "met": share >= 0.75},
        "next layer's copy has begun": {"met": begun_before(spans)},
        "t/s rise with resident layers": {
            "met": all(less.generation <= more.generation for less, more in pairwise(rising))
        },
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


if __name__ == "__main__":
    main()

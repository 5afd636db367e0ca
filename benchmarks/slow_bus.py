"""Context(kv_tier="host") where the bus is slow: a layer is computed while the next one's rows come.

    python benchmarks/slow_bus.py --rate 2000

The device is an RPC server in a network namespace of its own, whose loopback passes so many Mbit/s. It is
measured by turns: cells there; cells here with turns given ahead; the same with each layer waited for, as a
trace does. Needs Linux with `unshare`, `ip` and `tc`, and a llama-cpp-python with RPC.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # whose models and measurements these are

from ggml_calls import bus_rate  # noqa: E402
from support.models import ModelSpec, WeightType, write_model  # noqa: E402
from support.rpc_server import rpc_server  # noqa: E402

import pykvgraph as kvg  # noqa: E402
from pykvgraph.bench.tiers import decode_prompt  # noqa: E402
from pykvgraph.context.trace import take_spans  # noqa: E402

SPEC = ModelSpec(n_layer=8, n_embd=512, n_head=8, n_head_kv=8, n_ff=1024, weights=WeightType.Q8_0)
DEPTH, N_TOKENS = 500, 8
INSIDE = "--inside"


def enter(rate: int) -> None:
    """The same program in a network namespace of its own."""
    limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate}mbit burst 256kb latency 50ms"
    inside = f'{limit} && exec "$0" "$@"'
    program = [sys.executable, *sys.argv, INSIDE]
    os.execvp("unshare", ["unshare", "-rn", "sh", "-c", inside, *program])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=2000, help="Mbit/s")
    parser.add_argument("-r", type=int, default=3, help="repetitions")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.inside:
        enter(args.rate)
    args.models.mkdir(parents=True, exist_ok=True)
    path = write_model(SPEC, args.models)
    with rpc_server() as endpoint:
        (info,) = kvg.add_rpc_server(endpoint)
        print(json.dumps(measured(path, info.name, args.r), indent=1))


def measured(path: Path, device: str, repetitions: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"cells there": [], "given ahead": [], "waited for": []}
    with kvg.Model(path, device=device) as model:
        for _ in range(repetitions):
            for name, found in seconds.items():
                found.append(token_seconds(model, name))
        n_bytes = bytes_of_a_token(model)
    token = {name: statistics.median(found) for name, found in seconds.items()}
    computing, copying = token["cells there"], n_bytes / bus_rate(device, n_bytes)
    hidden = {
        name: (computing + copying - token[name]) / min(computing, copying)
        for name in ("given ahead", "waited for")
    }
    return {"seconds of a token": token, "copying alone": copying, "bytes": n_bytes, "hidden": hidden}


def bytes_of_a_token(model: kvg.Model) -> int:
    with kvg.Context(model, n_ctx=DEPTH + N_TOKENS + 24, kv_tier="host") as ctx:
        decode_prompt(ctx, DEPTH)
        ctx._handle.call(take_spans)
        ctx.append(5)
        return sum(span.n_bytes for span in ctx._handle.call(take_spans) if span.track == "copy in")


def token_seconds(model: kvg.Model, name: str) -> float:
    tier: Literal["device", "host"] = "device" if name == "cells there" else "host"
    with kvg.Context(model, n_ctx=DEPTH + N_TOKENS + 24, kv_tier=tier) as ctx:
        if name == "waited for":
            ctx._handle.call(take_spans)
        decode_prompt(ctx, DEPTH)
        ctx.append(5)
        begin = time.perf_counter()
        for _ in range(N_TOKENS):
            ctx.append(5)
        return (time.perf_counter() - begin) / N_TOKENS


if __name__ == "__main__":
    main()

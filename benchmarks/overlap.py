"""A prompt over two devices: micro-batches that overlap, and each waited for, as it asks for an output.

    python benchmarks/overlap.py

The devices are two RPC servers on loopback with a thread each, and half of the layers. While the second one
computes a micro-batch, the first one computes the next. By turns, on a machine with two idle CPUs or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # whose models these are

from support.models import ModelSpec, WeightType, write_model  # noqa: E402
from support.rpc_server import rpc_server  # noqa: E402

import pykvgraph as kvg  # noqa: E402

SPEC = ModelSpec(n_layer=8, n_embd=512, n_head=8, n_head_kv=8, n_ff=1024, weights=WeightType.Q8_0)
N_TOKENS, N_UBATCH = 512, 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-r", type=int, default=5, help="repetitions")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    path = write_model(SPEC, args.models)
    seconds: dict[str, list[float]] = {"overlapping": [], "waited for": []}
    with rpc_server() as first, rpc_server() as second:
        names = [info.name for each in (first, second) for info in kvg.add_rpc_server(each)]
        with (
            kvg.Model(path, device=",".join(names), tensor_split=(1, 1)) as model,
            kvg.Context(model, n_ctx=N_TOKENS, n_batch=N_TOKENS, n_ubatch=N_UBATCH, n_threads=1) as ctx,
        ):
            for _ in range(args.r + 1):
                for name, size in (("overlapping", N_TOKENS), ("waited for", N_UBATCH)):
                    seconds[name].append(prompt_seconds(ctx, size))
            held = {part.device: part.compute_bytes for part in ctx.devices}
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    print(json.dumps({"seconds": medians, "least": least(seconds), "graphs, bytes": held}, indent=1))


def least(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: min(found[1:]) for name, found in seconds.items()}


def prompt_seconds(ctx: kvg.Context, n_batch: int) -> float:
    ctx.reset()
    begin = time.perf_counter()
    for first in range(0, N_TOKENS, n_batch):
        batch = kvg.Batch()
        batch.extend([5] * n_batch, first, logits="last")
        ctx.decode(batch)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

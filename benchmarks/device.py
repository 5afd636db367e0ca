"""All that is measured on a device, in one go: is it right, how fast is it, what does an update cost.

python benchmarks/device.py -dev CUDA0              # minutes; --small for a software device

1. every operation of the cache, with all layers there and split, against the CPU (squared error over squares)
2. prompts, decoding, shift and defrag beside libllama on the same file and device (`pykvgraph bench --vs`),
   with a model of 0.2 B parameters and one of 7 B
3. the steps after a shift: how many are slower than a step before, and on CUDA how many replay a CUDA graph
4. bytes a second of K-shift and defrag, beside those of one ggml copy on the device
5. kv_tier="host" beside cells on the device and -nkvo, with its bars (host_tier.py)
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # whose models and measurements these are

from ggml_calls import REPETITIONS, copy_rate, timed  # noqa: E402
from host_tier import host_tier  # noqa: E402
from shapes import LLAMA_8B, machine, write_of_one_layer  # noqa: E402
from speed import measure  # noqa: E402
from support.every_op import OPTIONS, every_op, on_cpu, worst_step  # noqa: E402
from support.models import ModelSpec, WeightType, write_model  # noqa: E402

import pykvgraph as kvg  # noqa: E402

LARGE: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 3584}
SMALL: dict[str, Any] = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 256}
N_STEPS = 48
# name, layers on the device, arguments of Context
PLACES: list[tuple[str, int, dict[str, Any]]] = [
    ("all", -1, {}),
    ("split", 2, {}),
    ("cache on the host", -1, {"offload_kqv": False}),
    ("host tier", -1, {"kv_tier": "host"}),
    ("host tier, split", 2, {"kv_tier": "host"}),
]


class Replays(logging.Handler):
    """Counts what CUDA logs of its graphs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.reused = self.warmups = self.resets = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.reused += "CUDA Graph id" in text and "reused" in text
        self.warmups += "CUDA graph warmup complete" in text
        self.resets += "CUDA graph warmup reset" in text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-dev", help="a name that `pykvgraph info` lists (default: the first GPU)")
    parser.add_argument("--small", action="store_true", help="small model and depths, for a software device")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "device.json", help="where to write")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
    parser.add_argument("--part", choices=PARTS, help="only this, as JSON on the last line")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    device = args.dev or next((info.name for info in kvg.devices() if info.type == "gpu"), None)
    if device is None:
        parser.error("there is no GPU; name a device")
    if args.part:
        print(json.dumps(PARTS[args.part](device, args.models, args.small)))
        return
    report: dict[str, Any] = {
        "machine": {**machine(), "device": description_of(device)},
        "device": device,
    }
    for part in PARTS:
        print(f"{part}:", flush=True)
        report[part] = in_process(part, device, args.models, args.small)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(args.json)


def description_of(device: str) -> str:
    return next(info.description for info in kvg.devices() if info.name.lower() == device.lower())


def in_process(part: str, device: str, models: Path, small: bool) -> Any:
    """A process each: what one leaves behind, or dies of, is nothing to the others."""
    command = [sys.executable, __file__, "--part", part, "-dev", device, "--models", str(models)]
    environment = os.environ | ({"KVGRAPH_LOG": "debug"} if part == "after a shift" else {})
    done = subprocess.run(
        [*command, *(["--small"] if small else [])], env=environment, stdout=subprocess.PIPE, text=True
    )
    *progress, last = done.stdout.splitlines() or [""]
    print(*(progress or [last]), sep="\n", flush=True)
    return {"failed with": done.returncode} if done.returncode else json.loads(last)


def timed_model(models: Path, small: bool) -> Path:
    return write_model(ModelSpec(weights=WeightType.Q8_0, **(SMALL if small else LARGE)), models)


def speed(device: str, models: Path, small: bool) -> list[Any]:
    """`pykvgraph bench` beside libllama."""
    depth, n = (128, 1) if small else (4032, 5)
    path = timed_model(models, small)
    runs = [f"-p {depth // 8} -n 16 -d 16", f"-p 0 -n 16 -d {depth} --cache shift --cache defrag"]
    return [measure(path, f"{run} -dev {device}", n) for run in runs]


def speed_of_7b(device: str, models: Path, small: bool) -> list[Any]:
    """`pykvgraph bench` beside libllama, with a model as large as people have; not on a software device."""
    if small:
        return []
    path = write_of_one_layer(LLAMA_8B, models)
    return [measure(path, f"-p 512 -n 32 -d {depth} -dev {device}", 3) for depth in (0, 8000)]


def correctness(device: str, models: Path, small: bool) -> dict[str, float]:
    """Squared error over squares of logits, from those of the CPU: the worst step of every operation."""
    errors = {}
    path = write_model(ModelSpec(n_layer=3, n_head=4, n_head_kv=2, head_dim=64, rope_factors=True), models)
    for kv_type in ("f16", "f32", "q8_0", "q4_0"):
        expected = on_cpu(path, kv_type)
        for name, n_gpu_layers, where in PLACES:
            options: dict[str, Any] = {"type_k": kv_type, "type_v": kv_type, **where}
            with (
                kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
                kvg.Context(model, **options, **OPTIONS) as ctx,
            ):
                errors[f"{name}, {kv_type}"] = worst_step(every_op(ctx), expected)
                print(f"{name}, {kv_type}: NMSE {errors[f'{name}, {kv_type}']:.1e}", flush=True)
    return errors


def after_shift(device: str, models: Path, small: bool) -> dict[str, Any]:
    """Seconds of single steps before and after a shift that moves nothing, with what CUDA said meanwhile."""
    logging.getLogger().addHandler(logging.NullHandler())  # the log is counted, not shown
    depth = 200 if small else 4000
    counts = Replays()
    logger = logging.getLogger("pykvgraph")
    with (
        kvg.Model(timed_model(models, small), device=device) as model,
        kvg.Context(model, n_ctx=depth + 512, defrag_threshold=-1) as ctx,
    ):
        fill(ctx, depth)
        logger.addHandler(counts)
        before = [timed(lambda: ctx.append(5)) for _ in range(N_STEPS)]
        before_counts = dict(vars_of(counts))
        ctx.kv.seq_rm(0, 0, depth // 4)
        ctx.kv.seq_add(0, depth // 4, -1, -(depth // 4))
        after = [timed(lambda: ctx.append(5)) for _ in range(N_STEPS)]
        logger.removeHandler(counts)
    usual = statistics.median(before[N_STEPS // 4 :])
    return {
        "step": usual,
        "first after": after[0],
        "steps slower by a fifth": sum(seconds > 1.2 * usual for seconds in after),
        "of": N_STEPS,
        "CUDA graphs before": before_counts,
        "CUDA graphs after": {name: n - before_counts[name] for name, n in vars_of(counts).items()},
    }


def vars_of(counts: Replays) -> dict[str, int]:
    return {"reused": counts.reused, "warmups": counts.warmups, "resets": counts.resets}


def bandwidth(device: str, models: Path, small: bool) -> dict[str, dict[str, float]]:
    """GB/s, read and written counted: K-shifts and the two kinds of defrag by cache type, and a copy."""
    n_cells = 256 if small else 32768
    rates: dict[str, dict[str, float]] = {}
    with kvg.Model(timed_model(models, small), device=device) as model:
        for kv_type in ("f16", "q8_0"):
            # a multiple of 256, which the rows are padded to
            options: dict[str, Any] = {"n_ctx": n_cells + 256, "type_k": kv_type, "type_v": kv_type}
            with kvg.Context(model, **options, defrag_threshold=-1) as ctx:
                found = [updates(ctx, n_cells) for _ in range(REPETITIONS + 1)][1:]
                n_bytes = ctx.kv.bytes // 2
            rates[kv_type] = {
                name: statistics.median(each[name] for each in found) / 1e9 for name in found[0]
            }
            print(kv_type, json.dumps(rates[kv_type]), flush=True)
        rates["ggml_cpy"] = {"copy": copy_rate(device, n_bytes) / 1e9}
    return rates


def updates(ctx: kvg.Context, n_cells: int) -> dict[str, float]:
    """Bytes a second of each."""
    row = ctx.kv.bytes // ctx.kv.n_cells  # of K and V, which are of one type: K read and written
    rates = {}
    ctx.reset()
    fill(ctx, n_cells)
    for name, delta in (("K-shift", 1), ("K-shift again, by 2000", 2000), ("K-shift again, by 1", 1)):
        ctx.kv.seq_add(0, 0, -1, delta)
        shifted = ctx.kv.update()
        rates[name] = shifted.shifted_cells * row / shifted.seconds  # 0 where the CPU lets a quantized K wait
    n_past = ctx.kv.seq_pos_max(0) + 1
    ctx.kv.seq_rm(0, 0, n_past - n_cells // 2)
    ctx.kv.defrag("fill")
    moved = ctx.kv.update()
    rates["defrag, one run"] = 2 * moved.moved_bytes / moved.seconds
    for pos in range(n_past - n_cells // 2, n_past, 2):
        ctx.kv.seq_rm(0, pos, pos + 1)
    ctx.kv.defrag("fill")
    moved = ctx.kv.update()
    rates["defrag, every other cell"] = 2 * moved.moved_bytes / moved.seconds
    return rates


def fill(ctx: kvg.Context, n: int) -> None:
    ids = [3 + i % 250 for i in range(n)]
    for begin in range(0, n, ctx.n_batch):
        batch = kvg.Batch()
        batch.extend(ids[begin : begin + ctx.n_batch], pos0=begin)
        ctx.decode(batch)


PARTS: dict[str, Callable[[str, Path, bool], Any]] = {
    "correct": correctness,
    "after a shift": after_shift,
    "bandwidth": bandwidth,
    "host tier": host_tier,
    "speed": speed,
    "speed of 7 B": speed_of_7b,
}

if __name__ == "__main__":
    main()

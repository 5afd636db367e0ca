"""All that is measured on a device, in one go: is it right, how fast is it, what does an update cost.

python benchmarks/device.py -dev CUDA0              # minutes; --small for a software device

1. every operation of the cache, with all layers there and split, against the CPU (squared error over squares)
2. prompts, decoding, shift and defrag beside libllama on the same file and device (`pykvgraph bench --vs`)
3. the steps after a shift: how many are slower than a step before, and on CUDA how many replay a CUDA graph
4. bytes a second of K-shift and defrag, beside those of one ggml copy on the device
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # whose models and measurements these are
os.environ.setdefault("KVGRAPH_LOG", "debug")  # where CUDA tells which graph it replays

from speed import machine, measure  # noqa: E402
from support.every_op import OPTIONS, every_op, on_cpu  # noqa: E402
from support.judge import nmse  # noqa: E402
from support.models import ModelSpec, WeightType, write_model  # noqa: E402

import pykvgraph as kvg  # noqa: E402
from pykvgraph._native.library import library  # noqa: E402
from pykvgraph.bench.engines import ggml_device  # noqa: E402

LARGE: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 3584}
SMALL: dict[str, Any] = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 256}
N_STEPS = 48
REPETITIONS = 5


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
    parser.add_argument("-dev", default="auto", help="a name that `pykvgraph info` lists (default: auto)")
    parser.add_argument("--small", action="store_true", help="small model and depths, for a software device")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "device.json", help="where to write")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
    args = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # the log is counted, not shown
    args.models.mkdir(parents=True, exist_ok=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    exact = write_model(ModelSpec(n_layer=3, rope_factors=True), args.models)
    path = write_model(ModelSpec(weights=WeightType.Q8_0, **(SMALL if args.small else LARGE)), args.models)
    with kvg.Model(path, device=args.dev) as model:
        device = model.device
        report: dict[str, Any] = {"machine": machine(), "device": device, "model": path.name}
        report["correct"] = correctness(exact, device)
        report["after a shift"] = after_shift(model, 200 if args.small else 4000)
        report["bandwidth"] = bandwidth(model, device, 256 if args.small else 32768)
    depth = 128 if args.small else 4032
    runs = [f"-p {depth // 8} -n 16 -d 16", f"-p 0 -n 16 -d {depth} --cache shift --cache defrag"]
    n = "1" if args.small else "5"
    report["speed"] = [measure(path, f"{run} -dev {device}", int(n)) for run in runs]
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(args.json)


def correctness(path: Path, device: str) -> dict[str, float]:
    """Squared error over squares, of the logits after each operation, from those of the CPU."""
    errors = {}
    for kv_type in ("f16", "f32"):
        expected = on_cpu(path, kv_type)
        for name, n_gpu_layers, offload in (
            ("all", -1, True),
            ("split", 2, True),
            ("cache on the host", -1, False),
        ):
            with (
                kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
                kvg.Context(model, type_k=kv_type, type_v=kv_type, offload_kqv=offload, **OPTIONS) as ctx,
            ):
                errors[f"{name}, {kv_type}"] = nmse(every_op(ctx), expected)
                print(f"{name}, {kv_type}: NMSE {errors[f'{name}, {kv_type}']:.1e}", flush=True)
    return errors


def after_shift(model: kvg.Model, depth: int) -> dict[str, Any]:
    """Seconds of single steps before and after a shift that moves nothing, with what CUDA said meanwhile."""
    counts = Replays()
    logger = logging.getLogger("pykvgraph")
    with kvg.Context(model, n_ctx=depth + 512, defrag_threshold=-1) as ctx:
        fill(ctx, depth)
        logger.addHandler(counts)
        before = [timed(lambda: ctx.append(5)) for _ in range(N_STEPS)]
        before_counts = dict(vars_of(counts))
        ctx.kv.seq_rm(0, 0, depth // 4)
        ctx.kv.seq_add(0, depth // 4, -1, -(depth // 4))
        after = [timed(lambda: ctx.append(5)) for _ in range(N_STEPS)]
        logger.removeHandler(counts)
    usual = statistics.median(before[N_STEPS // 4 :])
    result = {
        "step": usual,
        "first after": after[0],
        "steps slower by a fifth": sum(seconds > 1.2 * usual for seconds in after),
        "of": N_STEPS,
        "CUDA graphs before": before_counts,
        "CUDA graphs after": {name: n - before_counts[name] for name, n in vars_of(counts).items()},
    }
    print(json.dumps(result), flush=True)
    return result


def vars_of(counts: Replays) -> dict[str, int]:
    return {"reused": counts.reused, "warmups": counts.warmups, "resets": counts.resets}


def bandwidth(model: kvg.Model, device: str, n_cells: int) -> dict[str, float]:
    """GB/s, read and written counted: of a K-shift, of the two kinds of defrag, and of a plain copy there."""
    n_ctx = n_cells + 256  # a multiple of 256, which the rows are padded to
    rates: dict[str, list[float]] = {"K-shift": [], "defrag, one run": [], "defrag, every other cell": []}
    with kvg.Context(model, n_ctx=n_ctx, defrag_threshold=-1) as ctx:
        row = ctx.kv.bytes // ctx.kv.n_cells  # of K and V, which are of one type: K read and written
        for _ in range(REPETITIONS + 1):
            ctx.reset()
            fill(ctx, n_cells)
            ctx.kv.seq_add(0, 0, -1, 1)
            shifted = ctx.kv.update()
            rates["K-shift"].append(shifted.shifted_cells * row / shifted.seconds)
            ctx.kv.seq_rm(0, 0, n_cells // 2 + 1)
            ctx.kv.defrag("fill")
            moved = ctx.kv.update()
            rates["defrag, one run"].append(2 * moved.moved_bytes / moved.seconds)
            for pos in range(n_cells // 2 + 1, n_cells, 2):
                ctx.kv.seq_rm(0, pos, pos + 1)
            ctx.kv.defrag("fill")
            moved = ctx.kv.update()
            rates["defrag, every other cell"].append(2 * moved.moved_bytes / moved.seconds)
        n_bytes = ctx.kv.bytes // 2
    result = {name: statistics.median(values[1:]) / 1e9 for name, values in rates.items()}
    result["copy"] = copy_rate(device, n_bytes) / 1e9
    print(json.dumps(result), flush=True)
    return result


def fill(ctx: kvg.Context, n: int) -> None:
    ids = [3 + i % 250 for i in range(n)]
    for begin in range(0, n, ctx.n_batch):
        batch = kvg.Batch()
        batch.extend(ids[begin : begin + ctx.n_batch], pos0=begin)
        ctx.decode(batch)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copy_rate(device: str, n_bytes: int) -> float:
    """Bytes a second, read and written counted, of a graph of one ggml_cpy."""
    base = ctypes.CDLL(str(next(p for p in library().ggml_paths if p.name.startswith("libggml-base"))))

    class InitParams(ctypes.Structure):
        _fields_ = [
            ("mem_size", ctypes.c_size_t),
            ("mem_buffer", ctypes.c_void_p),
            ("no_alloc", ctypes.c_bool),
        ]

    pointer = ctypes.c_void_p

    def function(name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(base, name)
        found.restype, found.argtypes = result, arguments
        return found

    backend = function("ggml_backend_dev_init", pointer, pointer, pointer)(ggml_device(device), None)
    context = function("ggml_init", pointer, InitParams)(InitParams(1 << 20, None, True))
    new_tensor = function("ggml_new_tensor_1d", pointer, pointer, ctypes.c_int, ctypes.c_int64)
    source, target = (new_tensor(context, 0, n_bytes // 4) for _ in range(2))  # F32
    node = function("ggml_cpy", pointer, pointer, pointer, pointer)(context, source, target)
    graph = function("ggml_new_graph", pointer, pointer)(context)
    function("ggml_build_forward_expand", None, pointer, pointer)(graph, node)
    buffer = function("ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)(context, backend)
    if not buffer:
        raise kvg.DeviceError(f"{device} has no room for two buffers of {n_bytes} bytes")
    compute = function("ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)
    seconds = [timed(lambda: compute(backend, graph)) for _ in range(REPETITIONS + 1)]
    function("ggml_backend_buffer_free", None, pointer)(buffer)
    function("ggml_free", None, pointer)(context)
    function("ggml_backend_free", None, pointer)(backend)
    return 2 * n_bytes / statistics.median(seconds[1:])


if __name__ == "__main__":
    main()

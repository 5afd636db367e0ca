"""A plan beside what is allocated: 12 kinds of models, and contexts whose K and V have four types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pykvgraph as kvg
from pykvgraph.plan.memory_model import learn_memory
from support.architectures import ArchSpec
from support.kept_graphs import SMALL, grow_graphs, saved_by_cpu
from support.models import WeightType

Q8_0 = WeightType.Q8_0
# dense, experts, windows, recurrent layers; heads of whole blocks, for all types of K and V
MODELS = [
    ArchSpec("llama", 4, n_head=4, n_head_kv=1, head_dim=64, n_embd=256, n_ff=512, weights=Q8_0),
    ArchSpec("llama", 3, n_expert=8),
    ArchSpec("qwen2", 3, scaling="yarn"),
    ArchSpec("qwen3", 4, n_head=8, n_head_kv=2, head_dim=64, n_embd=256, weights=WeightType.F16),
    ArchSpec("qwen3moe", 3, n_expert=8),
    ArchSpec("phi3", 3, fused=True),
    ArchSpec("gemma2", 4, window=96),
    ArchSpec("gemma3", 6, window=40, period=6, weights=Q8_0),
    ArchSpec("gemma4", 6, window=64, period=3, head_dim_window=64, n_head_kv_window=4, n_embd_layer=32),
    ArchSpec("gpt-oss", 4, window=64, n_expert=4, scaling="yarn"),
    ArchSpec("qwen35", 4, period=4, state_heads=4, n_rot=8, n_head=8),
    ArchSpec("granitehybrid", 4, period=3, state_heads=8),
    ArchSpec(
        "deepseek2", 4, n_head_kv=1, n_expert=4, n_ff_shared=96, rank=96, n_behind=32, q_rank=40, head_dim=64
    ),
]
KV_TYPES = ["f32", "f16", "q8_0", "q4_0"]
SIZES: dict[str, Any] = {"n_ctx": 400, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}


class Compared(NamedTuple):
    """One kind of bytes on one device."""

    device: str
    kind: str
    predicted: int
    allocated: int

    @property
    def error(self) -> float:
        return abs(self.predicted - self.allocated) / max(self.allocated, 1)


def compare(
    path: Path,
    device: str,
    kv_type: str,
    n_gpu_layers: int = -1,
    kv_tier: str = "device",
    n_outputs_max: int = 0,
) -> Iterator[Compared]:
    """What was planned before the model is loaded, and what a context at its largest has."""
    options = {**SIZES, "type_k": kv_type, "type_v": kv_type}
    cached = 0 if device == "cpu" else saved_by_cpu(path, SIZES["n_ctx"] - SIZES["n_batch"], **options)
    options |= {"kv_tier": kv_tier, "n_outputs_max": n_outputs_max}
    plan = kvg.plan_memory(path, device, n_gpu_layers=n_gpu_layers, **options)
    with (
        kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
        kvg.Context(model, **options) as ctx,
    ):
        grow_graphs(ctx, cached, max(n_outputs_max, SMALL))
        held = ctx.devices
    assert [part.device for part in plan] == [part.device for part in held]
    for before, after in zip(plan, held, strict=True):
        for kind in ("weight_bytes", "cache_bytes", "compute_bytes"):
            yield Compared(after.device, kind, getattr(before, kind), getattr(after, kind))


def by_coefficients(path: Path, kv_type: str) -> Iterator[Compared]:
    """What the five coefficients of `pykvgraph plan` say of the CPU, beside exact plans of other sizes.

    A prompt of so many tokens, decoded at once, and a cache of as many cells; they were learned from plans
    of 256 to 2,048.
    """
    options: dict[str, Any] = {"device": "cpu", "type_k": kv_type, "type_v": kv_type, "n_threads": 1}
    model = learn_memory(path, **options)
    for n in (640, 1900, 8000):
        (part,) = kvg.plan_memory(path, n_ctx=n, n_batch=n, n_ubatch=n, **options)
        planned = part.cache_bytes + part.compute_bytes
        yield Compared("CPU", f"a prompt of {n}", round(model.prefill(1, n)), planned)
        yield Compared("CPU", f"a cache of {n}", round(model.next_token(n, 0)), part.cache_bytes)

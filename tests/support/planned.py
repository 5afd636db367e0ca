"""A plan beside what is allocated: 12 kinds of models, and contexts whose K and V have four types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pykvgraph as kvg
from pykvgraph.engine.speculation.draft_model import ModelDrafter
from pykvgraph.plan.memory_model import learn_memory
from support.architectures import ArchSpec
from support.engines import Token, batch_of
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
# of batches: one micro-batch, several, and many texts with a token each
SHAPES: list[dict[str, Any]] = [
    {"n_batch": 64, "n_ubatch": 64},
    {"n_batch": 96, "n_ubatch": 24},
    {"n_batch": 64, "n_ubatch": 64, "n_seq_max": 48},
]
# whose every token sees all of its text
ENCODERS = [
    ArchSpec("bert", 3, n_head_kv=4, head_dim=16, biases=True),
    ArchSpec("nomic-bert", 3, n_head_kv=4, head_dim=16),
    ArchSpec("gemma-embedding", 4, window=24, period=2, weights=Q8_0),
]


class Compared(NamedTuple):
    """One kind of bytes on one device."""

    device: str
    kind: str
    predicted: int
    allocated: int

    @property
    def error(self) -> float:
        """Infinite where more was allocated than planned."""
        if self.allocated > self.predicted:
            return math.inf
        return (self.predicted - self.allocated) / max(self.allocated, 1)


def compare(
    path: Path,
    device: str,
    kv_type: str,
    n_gpu_layers: int = -1,
    adapter: Path | None = None,
    **more: Any,
) -> Iterator[Compared]:
    """What was planned before the model is loaded, and what a context at its largest has.

    adapter: one that takes part. more: arguments of Context.
    """
    options = {**SIZES, "type_k": kv_type, "type_v": kv_type}
    cached = 0 if device == "cpu" else saved_by_cpu(path, SIZES["n_ctx"] - SIZES["n_batch"], **options)
    options |= more
    adapters = [adapter] if adapter else []
    plan = kvg.plan_memory(path, device, n_gpu_layers=n_gpu_layers, adapters=adapters, **options)
    with kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model:
        loaded = [(model.load_adapter(each), 1.0) for each in adapters]
        with kvg.Context(model, **options, adapters=loaded) as ctx:
            grow_graphs(ctx, cached, max(options.get("n_outputs_max", 0), SMALL))
            decode_apart(ctx)
            held = ctx.devices
    yield from beside(plan, held)


def compare_with_draft(path: Path, draft: Path, shape: dict[str, Any]) -> Iterator[Compared]:
    """The same of both contexts of an engine with a draft model."""
    most = 4
    threads: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}
    with (
        kvg.Model(path, device="cpu") as model,
        kvg.Model(draft, device="cpu") as second,
        kvg.Engine(
            model, draft=second, draft_max=most, n_ctx=400, background=False, **threads, **shape
        ) as engine,
    ):
        ctx, drafts = engine.context, draft_context(engine)
        assert drafts is not None
        sizes: dict[str, Any] = {"n_ctx": 400, "n_seq_max": ctx.n_seq_max, **threads, **shape}
        kept = {name: getattr(ctx, name) for name in ("checkpoint_cells", "checkpoint_bytes")}
        n_outputs = ctx.n_seq_max * (1 + most)
        plan = kvg.plan_memory(path, "cpu", **sizes, **kept, n_outputs_max=n_outputs)
        beside_it = kvg.plan_memory(draft, "cpu", **sizes, swa_full=True)
        for each, n in ((ctx, n_outputs), (drafts, SMALL)):
            grow_graphs(each, n_outputs=n)
            decode_apart(each)
        yield from beside(plan, ctx.devices)
        yield from beside(beside_it, drafts.devices)


def draft_context(engine: kvg.Engine) -> kvg.Context | None:
    """That of the draft model; None: there are no drafts."""
    speculation = engine._loop.stepper._speculation
    if speculation is None:
        return None
    assert isinstance(speculation._drafter, ModelDrafter)
    return speculation._drafter._ctx


def decode_apart(ctx: kvg.Context) -> None:
    """A token in each sequence."""
    ctx.reset()
    n = min(ctx.n_seq_max, ctx.n_batch)
    ctx.decode(batch_of(Token(5, 0, (seq,)) for seq in range(n)))


def beside(plan: Sequence[kvg.DevicePart], held: Sequence[kvg.DevicePart]) -> Iterator[Compared]:
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

"""LoRA adapters as llama.cpp's converter writes them, and libllama with one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pykvgraph.bench.libllama import LibllamaContext, LibllamaModel
from pykvgraph.params.params import ContextParams
from support.engines import Logits, Scenario
from support.models import WeightType, write_out
from support.referee import Referee

# matrices that training changes; what lies between layers has other names
NAMES = (
    "attn_q.",
    "attn_k.",
    "attn_v.",
    "attn_qkv.",
    "attn_output.",
    "attn_gate.",
    "ffn_gate.",
    "ffn_up.",
    "ffn_down.",
)
EXPERTS = ("ffn_gate_exps.", "ffn_up_exps.", "ffn_down_exps.", "ffn_gate_up_exps.", "ffn_gate_inp.")
SHARED = ("ffn_gate_shexp.", "ffn_up_shexp.", "ffn_down_shexp.")
STATES = (
    "ssm_in.",
    "ssm_out.",
    "ssm_beta.",
    "ssm_alpha.",
    "ssm_ba.",
    "shortconv.in_proj.",
    "shortconv.out_proj.",
)
# libllama's graphs of these leave adapters out
LATENTS = ("attn_q_a.", "attn_q_b.", "attn_kv_a_mqa.")
LAYERS = (*NAMES, *EXPERTS, *SHARED, *STATES)


def write_adapter(
    path: Path,
    model: Path,
    *,
    names: Sequence[str] = LAYERS,
    frame: Sequence[str] = (),
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    kind: WeightType = WeightType.F32,
    arch: str | None = None,
    keys: dict[str, str] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """An adapter that adds to every matrix of the model whose name has one of these parts.

    frame: whole names. keys: instead of those of a converter. tensors: more of them.
    """
    reader = gguf.GGUFReader(model)
    own = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, arch or own)
    for key, value in {"general.type": "adapter", "adapter.type": "lora", **(keys or {})}.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    random = np.random.default_rng(seed)
    for tensor in reader.tensors:
        ne = [int(extent) for extent in tensor.shape]
        is_chosen = tensor.name in frame or any(f".{name}weight" in tensor.name for name in names)
        if not is_chosen or len(ne) < 2:
            continue
        halves = random_pair(random, ne, rank, is_embedding=tensor.name == "token_embd.weight")
        for end, half in zip("ab", halves, strict=True):
            writer.add_tensor(f"{tensor.name}.lora_{end}", gguf.quantize(half, kind), raw_dtype=kind)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    write_out(writer)
    return path


def random_pair(
    random: np.random.Generator, ne: list[int], rank: int, *, is_embedding: bool = False
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """lora_a and lora_b of a matrix of `ne`, as NumPy has them; their product is as large as a weight."""
    experts = ne[2:]
    if is_embedding:  # a has a row for each token, b makes n_embd numbers of it
        a = random.normal(0.0, 0.3, (ne[1], rank))
        b = random.normal(0.0, 0.3, (ne[0], rank))
    else:
        a = random.normal(0.0, ne[0] ** -0.5, (*experts, rank, ne[0]))
        b = random.normal(0.0, rank**-0.5, (*experts, ne[1], rank))
    return a.astype(np.float32), b.astype(np.float32)


def merged(path: Path, model: Path, adapter: Path, scale: float) -> Path:
    """The model with the adapter added to its weights; all of these are F32."""
    shutil.copy(model, path)
    halves = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(adapter).tensors}
    alpha = gguf.GGUFReader(adapter).fields["adapter.lora.alpha"].contents()
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if f"{tensor.name}.lora_a" in halves:
            a, b = halves[f"{tensor.name}.lora_a"], halves[f"{tensor.name}.lora_b"]
            tensor.data[...] += np.float32(scale * alpha / b.shape[-1]) * (b @ a)
    return path


@contextmanager
def libllama_with(
    path: Path, adapters: Sequence[tuple[Path, float]], *, flash: bool, n_ctx: int = 512
) -> Iterator[Referee]:
    """libllama on the CPU, with these adapters and scales."""
    params = ContextParams(
        n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ctx, n_threads=1, type_k="f16", type_v="f16", flash_attn=flash
    )
    model = LibllamaModel(path, extra_buffers=False)
    try:
        loaded = [(model.load_adapter(adapter), scale) for adapter, scale in adapters]
        context = LibllamaContext(model, params)
        try:
            context.set_adapters(loaded)
            yield Referee.of(context)
        finally:
            context.close()
    finally:
        model.close()


def judged(path: Path, adapters: Sequence[tuple[Path, float]], scenario: Scenario) -> tuple[Logits, Logits]:
    """What libllama says by its flash attention, and by the plain one."""
    found = []
    for flash in (True, False):
        with libllama_with(path, adapters, flash=flash) as referee:
            found.append(scenario(referee))
    return found[0], found[1]

"""The models of the benchmarks: random weights in the shapes of models that people run, with fewer layers."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # whose models these are, only larger

import gguf  # noqa: E402
import numpy as np  # noqa: E402
from support.architectures import ArchSpec, write_architecture  # noqa: E402
from support.models import (  # noqa: E402
    ModelSpec,
    WeightType,
    add_metadata,
    add_vocabulary,
    random_tensors,
    write_model,
)

import pykvgraph as kvg  # noqa: E402

STORIES = ROOT / "tests" / "data" / "stories260K.gguf"
SMALL: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 3584}
# As Llama 3.1 8B, without its vocabulary.
LLAMA_8B = ModelSpec(
    n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336, rope_base=500000.0, weights=WeightType.Q4_0
)
LARGE: dict[str, Any] = {"n_layer": 22, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "n_ff": 5632}
# Shaped as Qwen3-0.6B, Gemma-3-1B, Gemma-4-E2B, gpt-oss and Qwen3.5-0.8B are, with fewer layers: 221, 206,
# 231, 241 and 232 M parameters.
QWEN3 = ArchSpec(
    "qwen3", n_layer=14, n_embd=1024, n_head=16, n_head_kv=8, head_dim=128, n_ff=3072, weights=WeightType.Q8_0
)
GEMMA3 = ArchSpec(
    "gemma3",
    n_layer=12,
    n_embd=1152,
    n_head=4,
    n_head_kv=1,
    head_dim=256,
    n_ff=4096,
    window=512,
    period=6,
    weights=WeightType.Q8_0,
)
GEMMA4 = ArchSpec(
    "gemma4",
    n_layer=12,
    n_embd=1024,
    n_head=8,
    n_head_kv=1,
    head_dim=512,
    head_dim_window=256,
    n_ff=4096,
    n_shared=4,
    n_embd_layer=256,
    window=512,
    period=4,
    weights=WeightType.Q8_0,
)
GPT_OSS = ArchSpec(
    "gpt-oss",
    n_layer=8,
    n_embd=1024,
    n_head=32,
    n_head_kv=4,
    head_dim=64,
    n_ff=1024,
    n_expert=8,
    n_expert_used=4,
    window=128,
    weights=WeightType.Q8_0,
)
# Experts as gpt-oss and Qwen 3 have them, 4 of 32 and 8 of 128: 213 and 207 M parameters. The second is for
# libllama to quantize.
EXPERTS_OF_GPT_OSS = ArchSpec(
    "gpt-oss",
    n_layer=8,
    n_embd=512,
    n_head=16,
    n_head_kv=4,
    head_dim=64,
    n_ff=512,
    n_expert=32,
    n_expert_used=4,
    window=128,
    weights=WeightType.Q8_0,
    expert_weights=WeightType.MXFP4,
)
EXPERTS_OF_QWEN3 = ArchSpec(
    "qwen3moe",
    n_layer=4,
    n_embd=512,
    n_head=8,
    n_head_kv=2,
    head_dim=128,
    n_ff=256,
    n_expert=128,
    n_expert_used=8,
    weights=WeightType.F16,
)
QWEN35 = ArchSpec(
    "qwen35",
    n_layer=12,
    n_embd=1024,
    n_head=8,
    n_head_kv=2,
    head_dim=256,
    n_rot=64,
    n_ff=3072,
    period=4,
    state_heads=16,
    state_heads_k=16,
    state_dim=128,
    weights=WeightType.Q8_0,
)
# with a row for each token
BY_TOKEN = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
N_CTX_TRAIN = 32768


def written(source: ModelSpec | ArchSpec | Path, directory: Path) -> Path:
    """The model's file in the directory, written on first use."""
    if isinstance(source, Path):
        return source
    return (
        write_model(source, directory)
        if isinstance(source, ModelSpec)
        else write_architecture(source, directory)
    )


def with_tokenizer(source: Path, target: Path) -> Path:
    """A copy with the tokenizer of stories260K and a context of 32,768, so that servers take it.

    Where a matrix has a row for each token, its rows are repeated for the tokens that are new.
    """
    if target.exists():
        return target
    model, vocabulary = gguf.GGUFReader(source), gguf.GGUFReader(STORIES)
    arch = model.fields["general.architecture"].contents()
    n_vocab = len(vocabulary.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(target, arch)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_vocab_size(n_vocab)
    replaced = ("GGUF.", "general.architecture", f"{arch}.context_length", f"{arch}.vocab_size")
    for reader, is_wanted in ((model, False), (vocabulary, True)):
        for key, field in reader.fields.items():
            if (
                key.startswith("tokenizer.") == is_wanted
                and not key.startswith("GGUF.")
                and key not in replaced
            ):
                kinds = field.types
                writer.add_key_value(key, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in model.tensors:
        rows = np.array(tensor.data)
        if tensor.name in BY_TOKEN:
            rows = np.resize(rows, (n_vocab, *rows.shape[1:]))
        writer.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_of_one_layer(spec: ModelSpec, directory: Path) -> Path:
    """A model whose layers all have the first one's weights: large ones are written in seconds."""
    path = directory / f"{spec}-alike.gguf"
    if path.exists():
        return path
    writer = gguf.GGUFWriter(path, spec.arch)
    add_metadata(writer, spec)
    add_vocabulary(writer)
    first = "blk.0."
    for name, tensor in random_tensors(replace(spec, n_layer=1)).items():
        is_matrix = tensor.ndim > 1
        raw = gguf.quantize(tensor, spec.weights) if is_matrix else tensor
        for layer in range(spec.n_layer if name.startswith(first) else 1):
            target = name.replace(first, f"blk.{layer}.")
            writer.add_tensor(target, raw, raw_dtype=spec.weights if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return {
        "cpu": names[0] if names else platform.processor(),
        "n_cpus": len(os.sched_getaffinity(0)),
        "features": sorted(flag for flag in flags if flag.startswith(("avx", "amx"))),
        "pykvgraph": kvg.__version__,
        "ggml": kvg.library_info().ggml_version_running,
    }

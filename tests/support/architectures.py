"""Random GGUF files of every architecture that has a recipe, with what llama.cpp's own files leave out.

Shapes are small. `arch_spec`: what a model looks like; `arch_metadata`, `arch_tensors`: what is in its file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf

from support.arch_metadata import add_metadata
from support.arch_spec import ArchSpec
from support.arch_tensors import random_tensors
from support.models import WeightType, add_vocabulary, quantize_by_libllama, write_out

__all__ = ["ArchSpec", "write_architecture"]

# what converters leave in F32
KEPT = (
    "_q_norm",
    "_k_norm",
    ".ssm_a",
    ".ssm_d",
    ".ssm_conv1d",
    ".ssm_norm",
    ".shortconv.conv",
    "token_types",
    "ffn_gate_inp.weight",
)
# the first with some matrices in Q6_K, as people have it
K_QUANTS = {
    WeightType.Q4_K: "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    WeightType.Q6_K: "LLAMA_FTYPE_MOSTLY_Q6_K",
}


def write_architecture(spec: ArchSpec, directory: Path) -> Path:
    """Writes the model, or finds it where an earlier call left it."""
    path = directory / f"{spec}.gguf"
    if not path.exists() and spec.weights in K_QUANTS:
        source = write_architecture(replace(spec, weights=WeightType.F32), directory)
        quantize_by_libllama(source, path, K_QUANTS[spec.weights], pure=False)
    elif not path.exists():
        writer = gguf.GGUFWriter(path, spec.arch)
        add_metadata(writer, spec)
        add_vocabulary(writer)
        for name, tensor in random_tensors(spec).items():
            kind = spec.expert_weights or spec.weights if "_exps.weight" in name else spec.weights
            if tensor.ndim == 1 or name.endswith("bias") or any(part in name for part in KEPT):
                writer.add_tensor(name, tensor)
            else:
                writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        write_out(writer)
    return path

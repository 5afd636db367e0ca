"""Random assistants of Gemma 4 (gemma4-assistant), and one that knows what its model says next."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from support.arch_metadata import add_metadata
from support.arch_random import Random, Tensors
from support.arch_spec import ArchSpec
from support.arch_tensors import random_tensors
from support.crafted_heads import ADDED
from support.models import WeightType, add_tensors, add_vocabulary, write_out

_LEFT_OUT = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight", "attn_qkv.weight")


def assistant_spec(target: ArchSpec, n_embd: int = 32, n_layer: int = 3) -> ArchSpec:
    """The same attention, fewer and narrower layers: the last one attends to everything."""
    return replace(
        target,
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=64,
        n_expert=0,
        period=n_layer,
        fused=False,
        n_shared=0,
        n_embd_layer=0,
        v_of_k=False,
        seed=target.seed + 7,
    )


def assistant_tensors(spec: ArchSpec, n_embd_target: int) -> Tensors:
    """Random ones by name, without K and V; n_embd_target: width of the states of its model."""
    random = Random(spec)
    made = {
        name: tensor
        for name, tensor in random_tensors(spec).items()
        if name != "output.weight" and not name.endswith(_LEFT_OUT)
    }
    return made | {
        "nextn.pre_projection.weight": random.matrix(spec.n_embd, 2 * n_embd_target),
        "nextn.post_projection.weight": random.matrix(n_embd_target, spec.n_embd),
    }


def write_assistant(
    target: ArchSpec,
    path: Path,
    *,
    spec: ArchSpec | None = None,
    tensors: Tensors | None = None,
    weights: WeightType = WeightType.F32,
    n_embd_target: int = 0,
    n_drafting: int = -1,
) -> Path:
    """Writes an assistant for models of the spec `target`.

    The others make a file that fits no such model. spec, tensors: in place of assistant_spec() and
    assistant_tensors(). n_embd_target: in place of the model's width; 0: that. n_drafting: layers that the
    file says to draft; -1: all.
    """
    spec = spec or assistant_spec(target)
    width = n_embd_target or target.n_embd
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    add_metadata(writer, spec)
    writer.add_embedding_length_out(width)
    writer.add_nextn_predict_layers(spec.n_layer if n_drafting < 0 else n_drafting)
    add_vocabulary(writer)
    add_tensors(writer, tensors or assistant_tensors(spec, width), weights)
    write_out(writer)
    return path


def crafted_pair(target: ArchSpec, source: Path, folder: Path, noise: float) -> tuple[Path, Path]:
    """The model of the file `source` without what its layers add, so that each token decides the next one.
    And an assistant that says the same.

    noise: how much of the hidden state gets into the assistant, whose drafts are wrong at times then.
    """
    model = folder / "model.gguf"
    shutil.copyfile(source, model)
    outputs = None
    for tensor in gguf.GGUFReader(model, "r+").tensors:
        if tensor.name.endswith(ADDED):
            tensor.data[:] = 0
        elif tensor.name == "output_norm.weight":
            tensor.data[:] = 1
        elif tensor.name == "output.weight":
            tensor.data[2] = 0  # a text never ends by itself
            outputs = np.array(tensor.data)
    assert outputs is not None
    n, rng = target.n_embd, np.random.default_rng(8)
    spec = assistant_spec(target, n_embd=n)
    tensors = assistant_tensors(spec, n)
    for name in tensors:
        if name.endswith(ADDED):
            tensors[name][:] = 0
    projection = np.hstack([np.eye(n), noise * rng.standard_normal((n, n))]).astype(np.float32)
    tensors |= {
        "token_embd.weight": outputs,
        "output_norm.weight": np.ones(n, np.float32),
        "nextn.pre_projection.weight": projection,
    }
    return model, write_assistant(target, folder / "assistant.gguf", spec=spec, tensors=tensors)

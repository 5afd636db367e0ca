"""What a model and a context on it take on each device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import Any

from pykvgraph._native.handles import Handle
from pykvgraph._native.library import lib
from pykvgraph.checks import native_path
from pykvgraph.model.device import read_parts
from pykvgraph.model.device_types import DevicePart
from pykvgraph.model.gguf_file import GgufFile
from pykvgraph.params.overrides import Overrides
from pykvgraph.params.params import ContextParams, ModelParams


def plan_memory(
    path: str | os.PathLike[str],
    device: str = ModelParams.device,
    *,
    n_gpu_layers: int = ModelParams.n_gpu_layers,
    tensor_split: Sequence[float] | None = ModelParams.tensor_split,
    kv_overrides: Overrides | None = ModelParams.kv_overrides,
    layers: range | None = ModelParams.layers,
    draft_heads: bool = ModelParams.draft_heads,
    assistant: str | os.PathLike[str] | None = ModelParams.assistant,
    adapters: Iterable[str | os.PathLike[str]] = (),
    **context: Any,
) -> tuple[DevicePart, ...]:
    """The memory that a Model and a Context with these arguments would use on each device, the CPU last.

    path, device, n_gpu_layers, tensor_split, kv_overrides, layers, draft_heads, assistant: as Model
    takes them.
    adapters: files of LoRA adapters that take part; graphs are larger with them, and their own matrices are
    not counted.
    context: the other keyword arguments of Context (n_ctx, type_k, ...). No weights are loaded and no cache
    is allocated. Raises what Model, model.load_adapter() and Context raise, except DeviceError for a device
    with too little memory.
    """
    model_params = ModelParams(
        device, n_gpu_layers, tensor_split, kv_overrides, layers, draft_heads, assistant
    )
    context_params = ContextParams(**context)
    with GgufFile(path, kv_overrides=kv_overrides) as file:
        n_params = file.model_info().n_params
    files = [native_path(each) for each in adapters]
    texts = (ctypes.c_char_p * len(files))(*files)
    handle = Handle.open(
        lib().kvg_plan_new,
        native_path(path),
        ctypes.byref(model_params.native()),
        ctypes.byref(context_params.native(n_params)),
        ctypes.cast(texts, ctypes.POINTER(ctypes.POINTER(ctypes.c_char))),
        len(files),
        free=lib().kvg_plan_free,
        name="plan",
    )
    try:
        return handle.call(read_parts, lib().kvg_plan_n_parts, lib().kvg_plan_get_part)
    finally:
        handle.close()

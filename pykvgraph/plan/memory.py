"""What a model and a context on it take on each device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from pykvgraph._native.handles import Handle
from pykvgraph._native.library import lib
from pykvgraph.device import read_parts
from pykvgraph.gguf_file import GgufFile, native_path
from pykvgraph.params import ContextParams, ModelParams
from pykvgraph.types import DevicePart


def plan_memory(
    path: str | os.PathLike[str],
    device: str = ModelParams.device,
    *,
    n_gpu_layers: int = ModelParams.n_gpu_layers,
    tensor_split: Sequence[float] | None = ModelParams.tensor_split,
    **context: Any,
) -> tuple[DevicePart, ...]:
    """What a Model of these arguments and a Context of these would have on each device.

    Nothing is loaded: what it takes is counted, and the devices are asked what they can do. `context` is as
    Context takes it. Raises what Model and Context raise, but not that a device is too small for it.
    """
    model_params = ModelParams(device, n_gpu_layers, tensor_split)
    context_params = ContextParams(**context)
    with GgufFile(path) as file:
        n_params = file.model_info().n_params
    handle = Handle.open(
        lib().kvg_plan_new,
        native_path(path),
        ctypes.byref(model_params.native()),
        ctypes.byref(context_params.native(n_params)),
        free=lib().kvg_plan_free,
        name="plan",
    )
    try:
        return handle.call(read_parts, lib().kvg_plan_n_parts, lib().kvg_plan_get_part)
    finally:
        handle.close()

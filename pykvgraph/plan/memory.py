"""What goes to which device: how a caller says it, and what it takes there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

from pykvgraph._native.ffi import KvgContextPart, KvgModelParams
from pykvgraph._native.handles import Handle
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import integer, real, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.gguf_file import GgufFile, native_path
from pykvgraph.types import DevicePart


def model_params(
    device: str, n_gpu_layers: int = -1, tensor_split: Sequence[float] | None = None
) -> KvgModelParams:
    """A Model's arguments, checked. Raises InvalidArgumentError, which names the argument."""
    if not isinstance(device, str) or not device.isascii() or "\0" in device:
        raise InvalidArgumentError(
            f'device must be "auto" or names that pykvgraph.devices() lists, got {shown(device)}'
        )
    shares = _shares(tensor_split)
    return sized(
        KvgModelParams,
        devices=device.encode(),
        n_gpu_layers=integer(n_gpu_layers, "n_gpu_layers"),
        tensor_split=(ctypes.c_float * len(shares))(*shares) if shares else None,
        n_split=len(shares),
    )


def _shares(tensor_split: Sequence[float] | None) -> list[float]:
    if tensor_split is None:
        return []
    if isinstance(tensor_split, (str, bytes)):
        raise InvalidArgumentError(f"tensor_split must be numbers, got {shown(tensor_split)}")
    try:
        values = list(tensor_split)
    except TypeError:
        raise InvalidArgumentError(f"tensor_split must be numbers, got {shown(tensor_split)}") from None
    return [real(value, f"tensor_split[{i}]", 0, 1e30) for i, value in enumerate(values)]


def plan_memory(
    path: str | os.PathLike[str],
    device: str = "auto",
    *,
    n_gpu_layers: int = -1,
    tensor_split: Sequence[float] | None = None,
    **context: Any,
) -> tuple[DevicePart, ...]:
    """What a Model of these arguments and a Context of these would have on each device.

    Nothing is loaded: what it takes is counted, and the devices are asked what they can do. `context` is as
    Context takes it. Raises what Model and Context raise, but not that a device is too small for it.
    """
    from pykvgraph.context import context_params  # which imports Model, which imports this

    params = model_params(device, n_gpu_layers, tensor_split)
    with GgufFile(path) as file:
        n_params = file.model_info().n_params
    handle = Handle.open(
        lib().kvg_plan_new,
        native_path(path),
        ctypes.byref(params),
        ctypes.byref(context_params(n_params, **context)),
        free=lib().kvg_plan_free,
        name="plan",
    )
    try:
        return handle.call(read_parts, lib().kvg_plan_n_parts, lib().kvg_plan_get_part)
    finally:
        handle.close()


def read_parts(
    handle: int, count: Callable[[int], int], get: Callable[..., object]
) -> tuple[DevicePart, ...]:
    return tuple(_part(handle, get, index) for index in range(count(handle)))


def _part(handle: int, get: Callable[..., object], index: int) -> DevicePart:
    part = sized(KvgContextPart)
    get(handle, index, ctypes.byref(part))
    return DevicePart(
        device=part.device.decode("utf-8", "replace"),
        n_layer=part.n_layer,
        n_cache=part.n_cache,
        weight_bytes=part.weight_bytes,
        cache_bytes=part.cache_bytes,
        compute_bytes=part.compute_bytes,
        attention=part.attention.decode(),
        shift_on_device=bool(part.shift_on_device),
        fallbacks=tuple(part.fallbacks.decode().split(", ")) if part.fallbacks else (),
    )

"""The constructor's arguments: which are supported, and what they are called here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.model.adapter import Adapter
from pykvgraph.model.model import Model
from pykvgraph.params.cache_type import CACHE_TYPES

RANDOM_SEED = 0xFFFFFFFF  # llama-cpp-python's default: a seed of its own for each model
_ALL_LAYERS = -1

# values that change nothing here; with any other the argument is refused
_ONLY: dict[str, tuple[Any, ...]] = {
    "split_mode": (1,),
    "main_gpu": (0,),
    "use_mmap": (True,),
    "use_mlock": (False,),
    "rope_scaling_type": (None, -1),
    "attention_type": (-1, 0),
    "rope_freq_base": (0.0,),
    "rope_freq_scale": (0.0,),
    "yarn_ext_factor": (-1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
    "yarn_orig_ctx": (0,),
    "op_offload": (None, True),
    "lora_base": (None,),
    "numa": (False, 0),
    "draft_model": (None,),
    "tfs_z": (1.0,),
    "penalize_nl": (True,),
}


class NoModelFileError(FileNotFoundError, ValueError):
    """A missing file: pykvgraph's FileNotFoundError, and the ValueError of llama-cpp-python."""


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Raises UnsupportedError for the first argument whose value pykvgraph can't do anything about."""
    for name, value in arguments.items():
        if name in _ONLY and not any(value is one or value == one for one in _ONLY[name]):
            raise UnsupportedError(
                f"{name}: llama-cpp-python takes it and pykvgraph doesn't; leave it at its default, "
                f"{_ONLY[name][0]!r}"
            )


def existing(model_path: str | os.PathLike[str]) -> str:
    """The path as a string. Raises NoModelFileError when there is no such file."""
    path = os.fspath(model_path)
    if not isinstance(path, str):
        raise InvalidArgumentError(f"model_path must be a str, got {path!r}")
    if not os.path.exists(path):
        raise NoModelFileError(f"there is no model file {path}")
    return path


def of_model(n_gpu_layers: int, tensor_split: Any, kv_overrides: Any) -> dict[str, Any]:
    """Model's arguments: no layer on a device means the CPU alone."""
    if n_gpu_layers == 0:
        return {"device": "cpu", "kv_overrides": kv_overrides}
    n_layers = max(n_gpu_layers, _ALL_LAYERS)
    return {"n_gpu_layers": n_layers, "tensor_split": tensor_split, "kv_overrides": kv_overrides}


def adapters(model: Model, lora_path: str | None, lora_scale: float) -> list[tuple[Adapter, float]]:
    """Context's argument. Raises what Model.load_adapter() raises."""
    return [(model.load_adapter(lora_path), lora_scale)] if lora_path else []


def cache_type(value: int | str | None, name: str) -> str:
    """type_k and type_v: ggml's number of a type, or its name here."""
    if value is None:
        return "f16"
    names = {number: each for each, number in CACHE_TYPES.items()}
    found = names.get(value) if isinstance(value, int) else value
    if found is None:
        known = ", ".join(f"{each} ({number:d})" for number, each in names.items())
        raise UnsupportedError(f"{name}: the cache has no type {value}; it has {known}")
    return found


def a_function(value: Any, name: str) -> Callable[..., Any] | None:
    """`value` if it can be called. Raises InvalidArgumentError."""
    if value is not None and not callable(value):
        raise InvalidArgumentError(f"{name} must be a function, got {value!r}")
    return value  # type: ignore[no-any-return]

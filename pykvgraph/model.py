"""A model: weights on a device, and what its file says of it."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pykvgraph._native.ffi import KvgLayerInfo
from pykvgraph._native.fork import renew_cached_properties_in_child, renew_lock_in_child
from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib, sized
from pykvgraph.gguf_file import native_path, read_metadata, read_model_info
from pykvgraph.params import ModelParams
from pykvgraph.text.tokenizer import Tokenizer, Vocabulary
from pykvgraph.types import LayerSpec


class Model(Closable):
    """A GGUF file, ready to run. Contexts on it go on when it is closed; the last one frees the weights.

    path: absolute. arch: as the file names it. device: where the layers are, several names separated by
    commas. layer_devices: of each layer, and of the output as one more. n_layer, n_embd (size of a
    hidden state), n_head, n_head_kv (heads of K and V), head_dim, n_vocab (logits of a token; there may be
    more than tokens), n_ctx_train (positions that it was trained for), n_params: counts. weight_bytes: size
    of the weights. layers: a LayerSpec for each layer; n_head, n_head_kv and head_dim are the most of any.
    All of them stay when it is closed.

    `device` is "auto" (RPC servers that were added and every GPU, or the CPU where there is none), "cpu", or
    names from `pykvgraph.devices()` separated by commas. n_gpu_layers: the last so many layers go there, the
    output counting as one, and the others stay on the CPU; negative: all. tensor_split: how those are shared
    out among several devices, a number for each; by default as much as each has free memory.

    Raises FileNotFoundError, ModelLoadError for a damaged file, UnsupportedError for a model that this build
    has no recipe for, DeviceError for a device that is missing or full.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str = ModelParams.device,
        *,
        n_gpu_layers: int = ModelParams.n_gpu_layers,
        tensor_split: Sequence[float] | None = ModelParams.tensor_split,
    ) -> None:
        params = ModelParams(device, n_gpu_layers, tensor_split).native()
        name = native_path(path)
        self.path = Path(os.fsdecode(name)).absolute()
        self._handle = Handle.open(
            lib().kvg_model_load, name, ctypes.byref(params), free=lib().kvg_model_free, name="model"
        )
        self._tokenizer_lock = threading.RLock()
        renew_lock_in_child(self, "_tokenizer_lock")
        info = self._handle.call(read_model_info, lib().kvg_model_get_info)
        self.arch = info.arch
        self.device = info.device
        self.n_layer = info.n_layer
        self.layer_devices = self._handle.call(_layer_devices, info.n_layer)
        self.n_embd = info.n_embd
        self.n_head = info.n_head
        self.n_head_kv = info.n_head_kv
        self.head_dim = info.head_dim
        self.n_vocab = info.n_vocab
        self.n_ctx_train = info.n_ctx_train
        self.n_params = info.n_params
        self.weight_bytes = info.weight_bytes
        self.layers = self._handle.call(_layers, info.n_layer)

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Every key of the file; arrays are lists. Read on first use."""
        return self._handle.call(lambda model: read_metadata(lib().kvg_model_gguf(model)))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; made on first use, and good even after the model is closed.

        Raises UnsupportedError or ModelLoadError when the file has none that can be used.
        """
        with self._tokenizer_lock:
            return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        vocabulary = self._handle.call(lambda model: Vocabulary.read(lib().kvg_model_gguf(model)))
        return Tokenizer(self.path, vocabulary)


renew_cached_properties_in_child(Model)


def _layer_devices(model: int, n_layer: int) -> tuple[str, ...]:
    names = []
    for layer in range(n_layer + 1):
        name = ctypes.POINTER(ctypes.c_char)()
        lib().kvg_model_layer_device(model, layer, ctypes.byref(name))
        names.append(ctypes.string_at(name).decode("utf-8", "replace"))
    return tuple(names)


def _layers(model: int, n_layer: int) -> tuple[LayerSpec, ...]:
    specs = []
    for layer in range(n_layer):
        info = sized(KvgLayerInfo)
        lib().kvg_model_get_layer(model, layer, ctypes.byref(info))
        specs.append(
            LayerSpec(
                kind="attention",
                group=info.group,
                n_head=info.n_head,
                n_head_kv=info.n_head_kv,
                head_dim_k=info.head_dim_k,
                head_dim_v=info.head_dim_v,
                window=info.window,
                rope=info.n_rot,
            )
        )
    return tuple(specs)

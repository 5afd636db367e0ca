"""A model: weights on a device, and what its file says of it."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from typing import Any

from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib
from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.gguf_file import native_path, read_metadata, read_model_info
from pykvgraph.tokenizer import Tokenizer, Vocabulary


class Model(Closable):
    """A GGUF file, ready to run. Contexts on it go on when it is closed; the last one frees the weights.

    path: absolute. arch: as the file names it. device: where the weights are. n_layer, n_embd (size of a
    hidden state), n_head, n_head_kv (heads of K and V), head_dim, n_vocab (logits of a token; there may be
    more than tokens), n_ctx_train (positions that it was trained for), n_params: counts. weight_bytes: size
    of the weights. All of them stay when it is closed.

    `device` is "auto" (the first GPU, else the CPU) or a name from `pykvgraph.devices()`. Raises
    FileNotFoundError, ModelLoadError for a damaged file, UnsupportedError for a model that this build has no
    recipe for, DeviceError for a device that is missing or full.
    """

    def __init__(self, path: str | os.PathLike[str], device: str = "auto") -> None:
        if not isinstance(device, str) or not device.isascii() or "\0" in device:
            raise InvalidArgumentError(
                f'device must be "auto" or a name that pykvgraph.devices() lists, got {shown(device)}'
            )
        name = native_path(path)
        self.path = Path(os.fsdecode(name)).absolute()
        self._handle = Handle.open(
            lib().kvg_model_load, name, device.encode(), free=lib().kvg_model_free, name="model"
        )
        self._tokenizer_lock = threading.Lock()
        info = self._handle.call(read_model_info, lib().kvg_model_get_info)
        self.arch = info.arch
        self.device = info.device
        self.n_layer = info.n_layer
        self.n_embd = info.n_embd
        self.n_head = info.n_head
        self.n_head_kv = info.n_head_kv
        self.head_dim = info.head_dim
        self.n_vocab = info.n_vocab
        self.n_ctx_train = info.n_ctx_train
        self.n_params = info.n_params
        self.weight_bytes = info.weight_bytes

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

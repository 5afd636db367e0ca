"""A model: the weights of a GGUF file on their devices, and what the file says about the model."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pykvgraph._native.fork import renew_cached_properties_in_child, renew_lock_in_child
from pykvgraph._native.handles import Closable, Handle, repr_of
from pykvgraph._native.library import lib
from pykvgraph.checks import native_path, parameters_text, size_text
from pykvgraph.errors import UnsupportedError
from pykvgraph.model.adapter import Adapter, checked_adapters, key_of
from pykvgraph.model.gguf_file import (
    fingerprint,
    fingerprint_under,
    read_key,
    read_layers,
    read_metadata,
    read_model_info,
    read_stage,
)
from pykvgraph.model.tokenizer import LoadedVocabulary, Tokenizer, has_tokenizer
from pykvgraph.params.overrides import Overrides
from pykvgraph.params.params import ModelParams

_log = logging.getLogger("pykvgraph")
_PIPELINE = "stream.Pipeline puts stages together (docs/streams.md)"


class Model(Closable):
    """A GGUF model file, opened and ready to run.

    Arguments. path: the GGUF file; of a split model the first (NAME-00001-of-00003.gguf). device: "auto"
    (every RPC server that was added and every GPU; the CPU when there is none), "cpu", or names from
    `pykvgraph.devices()` separated by commas. n_gpu_layers: how many of the last layers go to these devices,
    where the output counts as one more layer; the other layers stay on the CPU; a negative number: all
    layers. tensor_split: the share of these layers that each device gets, one number per device; None: in
    proportion to the devices' free memory. kv_overrides: values of metadata keys in place of the file's, or
    of keys that it hasn't, {"tokenizer.ggml.add_bos_token": False}; a bool, an int, a float or a str each, of
    the type that the file has there (docs/overrides.md). layers: a range: this process has these layers
    alone, as a stage of a pipeline (docs/streams.md); None: all. The first stage has the token embeddings,
    too, and the last one the output. draft_heads: whether the model's own draft head (MTP) is there, for an
    engine's drafts (docs/many-requests.md); it takes weights and cells like one more layer. assistant: the
    GGUF file of a small model that drafts for this one in place of a head (gemma4-assistant for Gemma 4); it
    attends to this model's cells, and has none.

    Attributes. path: the absolute path. arch: the architecture's name in the file. device: the names of the
    devices that the layers are on, separated by commas. layer_devices: the device of each layer, and last
    that of the output; "" for what another stage has. n_layer: number of layers, with the draft head.
    n_draft_heads: of the layers the last ones are draft heads, 0 or 1. has_draft_head: whether the file has
    one that can be used here. assistant: the path of the assistant, or None. drafts: whether the model has a
    draft head or an assistant. stage: the range of those layers that are here. n_embd: size of a hidden
    state. n_head, n_head_kv, head_dim: query heads, heads of K and V, and size of a head, each the largest of
    any layer. layers: a LayerSpec for each layer. n_vocab: number of logits per token, which can be more
    than the tokenizer has tokens. n_ctx_train: number of positions that the model was trained for. n_params:
    number of weights that are here. weight_bytes: their size in bytes. encodes: whether it is an encoder
    (BERT): it gives hidden states and no logits, a text is decoded by one call, and the cache keeps nothing
    of it. n_classes: scores that its classifier gives a text; 0: it is no reranker. classifies_by_mean:
    whether the classifier sees the mean of a text's states, not one of them. has_tokenizer: whether the file
    says how text becomes tokens; without, token ids are decoded all the same. kept_on_cpu: a sentence for
    each matrix that the CPU multiplies since the device of its layer can't. All attributes stay readable
    after the model is closed.

    A context goes on working when its model is closed; the weights are freed with the last context.

    Raises FileNotFoundError when there is no such file, ModelLoadError for a file that is no GGUF or damaged,
    UnsupportedError for a model that this build has no recipe for or that can't be cut into such stages,
    DeviceError for a device that is missing
    or has too little memory, and InvalidArgumentError for any other bad argument.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: str = ModelParams.device,
        *,
        n_gpu_layers: int = ModelParams.n_gpu_layers,
        tensor_split: Sequence[float] | None = ModelParams.tensor_split,
        kv_overrides: Overrides | None = ModelParams.kv_overrides,
        layers: range | None = ModelParams.layers,
        draft_heads: bool = ModelParams.draft_heads,
        assistant: str | os.PathLike[str] | None = ModelParams.assistant,
    ) -> None:
        given = ModelParams(device, n_gpu_layers, tensor_split, kv_overrides, layers, draft_heads, assistant)
        self.assistant = given.assistant
        self.kv_overrides = dict(given.kv_overrides or {})
        self._where = {field.name: getattr(given, field.name) for field in fields(given)}
        params = given.native()
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
        if self.device != "CPU":
            self._handle.stay()
        self.n_layer = info.n_layer
        self.stage = self._handle.call(read_stage)
        self.layer_devices = self._handle.call(_layer_devices, info.n_layer)
        self.n_embd = info.n_embd
        self.n_head = info.n_head
        self.n_head_kv = info.n_head_kv
        self.head_dim = info.head_dim
        self.n_vocab = info.n_vocab
        self.n_ctx_train = info.n_ctx_train
        self.n_params = info.n_params
        self.weight_bytes = info.weight_bytes
        self.encodes = info.encodes
        self._has_output = self.stage.stop == self.n_layer
        self._gives_logits = self._has_output and not self.encodes
        self.n_classes = info.n_classes
        self.classifies_by_mean = info.classifies_by_mean
        self.n_draft_heads = info.n_draft_heads
        self.has_draft_head = info.has_draft_head
        self.drafts = info.n_draft_heads > 0 or self.assistant is not None
        self.kept_on_cpu = info.kept_on_cpu
        for reason in self.kept_on_cpu:
            _log.warning("%s; the CPU does", reason)
        self.layers = self._handle.call(read_layers, lib().kvg_model_get_layer, info.n_layer)
        self._n_params_of_file = self._read_n_params()
        self.has_tokenizer = self._handle.call(lambda model: has_tokenizer(lib().kvg_model_gguf(model)))

    def __repr__(self) -> str:
        return repr_of(self, self._described)

    def _described(self) -> str:
        closed = ", closed" if self._handle.closed else ""
        sizes = f"{parameters_text(self.n_params)}, {size_text(self.weight_bytes)}"
        return f"{str(self.path)!r}, {self.arch}, {sizes}{closed}"

    def _read_n_params(self) -> int:
        """Of all stages: how many threads are worthwhile depends on the size of its matrices."""
        if len(self.stage) == self.n_layer:
            return self.n_params
        check = lib().kvg_gguf_check_model
        return self._handle.call(lambda model: read_model_info(lib().kvg_model_gguf(model), check)).n_params

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Every metadata key of the file and its value; arrays are lists. Read on first use."""
        return self._handle.call(lambda model: read_metadata(lib().kvg_model_gguf(model)))

    def _value(self, key: str) -> Any:
        """One key's value; None when there is none. Unless all were read before, the others stay unread."""
        if "metadata" in vars(self):
            return self.metadata.get(key)
        return self._handle.call(lambda model: read_key(lib().kvg_model_gguf(model), key))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. It is made on first use, and works even after the model is closed.

        Raises UnsupportedError when the file has no tokenizer or one of an unknown kind, and ModelLoadError
        when its tokenizer is damaged.
        """
        with self._tokenizer_lock:
            return self._tokenizer

    def load_adapter(self, path: str | os.PathLike[str]) -> Adapter:
        """Loads a LoRA adapter of this model, a GGUF file, for Context.set_adapters().

        Its weights go to the devices of the weights that it belongs to. Raises FileNotFoundError;
        ModelLoadError for a file that is damaged, no adapter, or one of another model; UnsupportedError for
        an adapter of another kind, or one that adds to what is no matrix of a product; DeviceError when a
        device has too little memory; InvalidArgumentError when the model is closed.
        """
        return Adapter(self._handle, path, self.device != "CPU")

    def _require_all_layers(self) -> None:
        """Raises UnsupportedError for a stage."""
        if len(self.stage) < self.n_layer:
            raise UnsupportedError(f"{self._stage_text()} can't answer by themselves: {_PIPELINE}")

    def _require_whole(self) -> None:
        """Raises UnsupportedError for what says nothing by itself: a stage, or an encoder."""
        self._require_all_layers()
        self._require_logits()

    def _require_logits(self) -> None:
        """Raises UnsupportedError for a stage that isn't the last, and for an encoder."""
        if self._gives_logits:
            return
        if not self._has_output:
            raise UnsupportedError(f"{self._stage_text()} have no logits, the last stage does: {_PIPELINE}")
        raise UnsupportedError(
            f"{self.arch} is an encoder: it has no logits and says nothing. It makes vectors of texts: "
            "Context.embeddings(), Engine.embed(), Llama.embed(), or /v1/embeddings of a server"
        )

    def _stage_text(self) -> str:
        return f"layers {self.stage.start} to {self.stage.stop - 1} of {self.n_layer}"

    def _fingerprint(self, adapters: Iterable[tuple[Adapter, float]] = ()) -> bytes:
        """16 bytes, by which files and measurements know their model again, under these adapters."""
        own = self._handle.call(lambda model: fingerprint(lib().kvg_model_gguf(model)))
        return fingerprint_under(own, key_of(checked_adapters(adapters)))

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        vocabulary = self._handle.call(
            lambda model: LoadedVocabulary.read(lib().kvg_model_gguf(model), self.kv_overrides)
        )
        return Tokenizer(self.path, vocabulary)


renew_cached_properties_in_child(Model)


def _layer_devices(model: int, n_layer: int) -> tuple[str, ...]:
    names = []
    for layer in range(n_layer + 1):
        name = ctypes.POINTER(ctypes.c_char)()
        lib().kvg_model_layer_device(model, layer, ctypes.byref(name))
        names.append(ctypes.string_at(name).decode("utf-8", "replace"))
    return tuple(names)

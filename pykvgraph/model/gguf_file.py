"""What a GGUF file has: its metadata, and the names, types and shapes of its tensors."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np

from pykvgraph._native.ffi import KvgGgufKv, KvgGgufTensor, KvgLayerInfo, KvgModelInfo, KvgState
from pykvgraph._native.fork import importing, renew_cached_properties_in_child
from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import native_path
from pykvgraph.params.overrides import Overrides, checked_overrides, native_overrides
from pykvgraph.types import LayerSpec, ModelInfo, TensorInfo

# GGUF's value types; 8 is a string
TEMPLATE_KEY = "tokenizer.chat_template"  # where GGUF files have it
_STRING = 8
_BOOL = 7
_DTYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

_SAMPLE_BYTES = 4096


class GgufFile(Closable):
    """An open GGUF file, for reading its metadata and its list of tensors; no weights are loaded.

    Opening checks every size and offset in the file against the file's length. The first file of a split
    model (NAME-00001-of-00003.gguf) stands for all of them: its metadata, the tensors of all. `path` is the
    absolute path. `metadata`, `tensors` and `parts` stay readable after close() if they were read before.

    kv_overrides: values of keys, in place of the file's or beside them, as Model takes them.

    Raises FileNotFoundError when there is no such file; ModelLoadError for a file that is no GGUF, is damaged
    or can't be read, and for a split model of which a part is missing or another's; InvalidArgumentError for
    a path that is no str or Path or has a NUL character; DeviceError when there is too little memory.
    """

    def __init__(self, path: str | os.PathLike[str], *, kv_overrides: Overrides | None = None) -> None:
        name, self.kv_overrides = native_path(path), checked_overrides(kv_overrides)
        self.path = Path(os.fsdecode(name)).absolute()
        array = native_overrides(self.kv_overrides)
        self._handle = Handle.open(
            lib().kvg_gguf_open, name, array, len(array), free=lib().kvg_gguf_free, name="GGUF file"
        )

    @functools.cached_property
    def parts(self) -> tuple[tuple[Path, int], ...]:
        """The files that the model is in and their sizes in bytes: one, or those of a split model."""
        return self._handle.call(read_parts)

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Every metadata key and its value; arrays are lists, bytes that are not UTF-8 become U+FFFD."""
        return self._handle.call(read_metadata)

    @functools.cached_property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Every tensor, in the file's order."""
        return self._handle.call(read_tensors)

    def model_info(self) -> ModelInfo:
        """The sizes of the model in this file.

        Raises UnsupportedError when this build can't run it, and ModelLoadError when a key or tensor that the
        model needs is missing or wrong.
        """
        return self._handle.call(read_model_info, lib().kvg_gguf_check_model)

    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the model in this file. Raises what model_info() raises."""
        n_layer = self.model_info().n_layer
        return self._handle.call(read_layers, lib().kvg_gguf_get_layer, n_layer)


renew_cached_properties_in_child(GgufFile)


def read_parts(gguf: int) -> tuple[tuple[Path, int], ...]:
    """Path and size of every file of an open model."""
    parts = []
    for index in range(lib().kvg_gguf_n_parts(gguf)):
        path, size = ctypes.POINTER(ctypes.c_char)(), ctypes.c_uint64()
        lib().kvg_gguf_get_part(gguf, index, ctypes.byref(path), ctypes.byref(size))
        parts.append((Path(os.fsdecode(ctypes.string_at(path))).absolute(), size.value))
    return tuple(parts)


def read_metadata(gguf: int) -> dict[str, Any]:
    """Every key of an open file."""
    metadata = {}
    for index in range(lib().kvg_gguf_n_kv(gguf)):
        entry = _entry(gguf, index)
        metadata[entry.key.decode("utf-8", "replace")] = _value(gguf, index, entry)
    return metadata


def read_key(gguf: int, key: str) -> Any:
    """One key's value; None when the file doesn't have it."""
    index = _find(gguf, key)
    return None if index is None else _value(gguf, index, _entry(gguf, index))


def read_strings(gguf: int, key: str) -> bytes:
    """An array of strings, byte by byte as the file has them, each with a NUL behind it.

    Empty when there is no such array.
    """
    index = _find(gguf, key)
    return b"" if index is None else _strings(gguf, index)


def read_tensors(gguf: int) -> tuple[TensorInfo, ...]:
    """Every tensor of an open file."""
    return tuple(_tensor(gguf, index) for index in range(lib().kvg_gguf_n_tensors(gguf)))


def fingerprint(gguf: int) -> bytes:
    """XXH3-128 of what a model computes with: its scalar keys, and its tensors, the large ones sampled."""
    arch = read_key(gguf, "general.architecture")
    with importing:
        import xxhash
    digest = xxhash.xxh3_128()
    entries = {}
    for index in range(lib().kvg_gguf_n_kv(gguf)):
        entry = _entry(gguf, index)
        key = _text(entry.key)
        if key.startswith(f"{arch}.") and not entry.is_array:
            entries[key] = _value(gguf, index, entry)
    digest.update(repr(sorted(entries.items())).encode())
    for index in range(lib().kvg_gguf_n_tensors(gguf)):
        tensor = sized(KvgGgufTensor)
        lib().kvg_gguf_get_tensor(gguf, index, ctypes.byref(tensor))
        digest.update(repr((_text(tensor.name), _text(tensor.type), list(tensor.ne), tensor.size)).encode())
        if tensor.size <= 3 * _SAMPLE_BYTES:
            digest.update(_bytes_of(gguf, tensor, 0, tensor.size))
        else:
            for offset in (0, (tensor.size - _SAMPLE_BYTES) // 2, tensor.size - _SAMPLE_BYTES):
                digest.update(_bytes_of(gguf, tensor, offset, _SAMPLE_BYTES))
    return digest.digest()


def _bytes_of(gguf: int, tensor: KvgGgufTensor, offset: int, n: int) -> bytes:
    """n bytes of a tensor, also where its file isn't mapped, as a stage has only its own layers mapped."""
    if tensor.data:
        return ctypes.string_at(tensor.data + offset, n)
    return os.pread(lib().kvg_gguf_fd(gguf, tensor.part), n, tensor.offset + offset)


def fingerprint_under(model: bytes, adapters: bytes) -> bytes:
    """The fingerprint of a model under adapters with this key; b"": none, and it is the same."""
    if not adapters:
        return model
    with importing:
        import xxhash
    return xxhash.xxh3_128(model + adapters).digest()


def read_model_info(pointer: int, function: Any) -> ModelInfo:
    """What `function`, a native call that fills a kvg_model_info, says."""
    info = sized(KvgModelInfo)
    function(pointer, ctypes.byref(info))
    values: dict[str, Any] = {name: getattr(info, name) for name, *_ in info._fields_[1:]}
    del values["layer_begin"], values["layer_end"]  # read_stage
    texts = {"arch": _text(info.arch), "device": _text(info.device)}
    kept = tuple(_text(info.kept_on_cpu).splitlines()) if info.kept_on_cpu else ()
    flags = {name: bool(getattr(info, name)) for name in ("encodes", "classifies_by_mean", "has_draft_head")}
    return ModelInfo(**{**values, **texts, **flags, "kept_on_cpu": kept})


def read_stage(model: int) -> range:
    """The layers of a model that are here."""
    info = sized(KvgModelInfo)
    lib().kvg_model_get_info(model, ctypes.byref(info))
    return range(info.layer_begin, info.layer_end)


_STATES = {
    KvgState.KVG_STATE_SHORT_CONV: "short_conv",
    KvgState.KVG_STATE_DELTA_NET: "delta_net",
    KvgState.KVG_STATE_MAMBA2: "mamba2",
}


def _kind(info: KvgLayerInfo) -> str:
    kinds = ["attention"] if info.group >= 0 else []
    if info.state != KvgState.KVG_STATE_NONE:
        kinds.append(_STATES[KvgState(info.state)])
    return ", ".join(kinds)


def read_layers(pointer: int, function: Any, n_layer: int) -> tuple[LayerSpec, ...]:
    """What `function`, a native call that fills a kvg_layer_info, says of each layer."""
    specs = []
    for layer in range(n_layer):
        info = sized(KvgLayerInfo)
        function(pointer, layer, ctypes.byref(info))
        specs.append(
            LayerSpec(
                kind=_kind(info),
                group=info.group,
                n_head=info.n_head,
                n_head_kv=info.n_head_kv,
                head_dim_k=info.head_dim_k,
                head_dim_v=info.head_dim_v,
                window=info.window,
                rope=info.n_rot,
                kv_from=info.kv_from,
            )
        )
    return tuple(specs)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _entry(gguf: int, index: int) -> KvgGgufKv:
    entry = sized(KvgGgufKv)
    lib().kvg_gguf_get_kv(gguf, index, ctypes.byref(entry))
    return entry


def _find(gguf: int, key: str) -> int | None:
    wanted = key.encode()
    return next(
        (index for index in range(lib().kvg_gguf_n_kv(gguf)) if _entry(gguf, index).key == wanted), None
    )


def _value(gguf: int, index: int, entry: KvgGgufKv) -> Any:
    values: list[Any]
    if entry.type == _STRING:
        values = _text(_strings(gguf, index)).split("\0")[:-1]
    else:
        dtype = np.dtype(_DTYPES[entry.type])
        values = np.frombuffer(ctypes.string_at(entry.data, entry.n * dtype.itemsize), dtype).tolist()
        if entry.type == _BOOL:
            values = [value != 0 for value in values]
    return values if entry.is_array else values[0]


def _strings(gguf: int, index: int) -> bytes:
    """The strings of a value, each with a NUL behind it; none when it has none."""
    size = ctypes.c_uint64()
    lib().kvg_gguf_copy_strings(gguf, index, None, 0, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    lib().kvg_gguf_copy_strings(gguf, index, data, size.value, ctypes.byref(size))
    return data.raw


def _tensor(gguf: int, index: int) -> TensorInfo:
    tensor = sized(KvgGgufTensor)
    lib().kvg_gguf_get_tensor(gguf, index, ctypes.byref(tensor))
    shape = list(tensor.ne)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return TensorInfo(
        _text(tensor.name), _text(tensor.type), tuple(shape), tensor.offset, tensor.size, tensor.part
    )

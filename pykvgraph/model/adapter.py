"""LoRA adapters: what a small file adds to a model's weights while a context uses it."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pykvgraph._native.ffi import KvgAdapterInfo
from pykvgraph._native.fork import importing, renew_cached_properties_in_child
from pykvgraph._native.handles import Closable, Handle, repr_of
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import native_path, parameters_text, real, several, shown, size_text
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.gguf_file import read_metadata
from pykvgraph.params.params import MOST_SCALE

MOST_ADAPTERS = 64  # that take part together
Active: TypeAlias = "tuple[tuple[Adapter, float], ...]"
_READ_BYTES = 1 << 20
_FORMAT = b"kvgraph-adapters-1\0"


class Adapter(Closable):
    """A LoRA adapter of a model, as llama.cpp's convert_lora_to_gguf makes them: `model.load_adapter(path)`.

    Attributes. path: the absolute path. alpha: what the file says; the adapter adds alpha / rank times its
    product, or the product itself where alpha is 0. n_pairs: how many of the model's matrices it adds to.
    n_params: numbers in its own matrices. n_bytes: their size on all devices. digest: the file's SHA-256.

    Contexts that use it go on doing so when it is closed.
    """

    def __init__(self, model: Handle, path: str | os.PathLike[str], has_device: bool) -> None:
        if not isinstance(model, Handle):
            raise InvalidArgumentError("an adapter is made by model.load_adapter(path)")
        name = native_path(path)
        self.path = Path(os.fsdecode(name)).absolute()
        self._model = model
        load, free = lib().kvg_adapter_load, lib().kvg_adapter_free
        self._handle = Handle.open(model.call, load, name, free=free, name="adapter", shared=True)
        if has_device:
            self._handle.stay()
        info = self._handle.call(_read_info)
        self.alpha = float(info.alpha)
        self.n_pairs = int(info.n_pairs)
        self.n_params = int(info.n_params)
        self.n_bytes = int(info.bytes)
        self.digest = self._handle.call(_digest)  # now: the file may be overwritten later

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """Every metadata key of the file and its value. Read on first use."""
        return self._handle.call(lambda adapter: read_metadata(lib().kvg_adapter_gguf(adapter)))

    def __repr__(self) -> str:
        return repr_of(self, self._described)

    def _described(self) -> str:
        closed = ", closed" if self._handle.closed else ""
        return f"{str(self.path)!r}, {parameters_text(self.n_params)}, {size_text(self.n_bytes)}{closed}"


renew_cached_properties_in_child(Adapter)


def pairs_of(adapters: Any) -> Active:
    """Pairs of an adapter and its scale, as given. Raises InvalidArgumentError for anything else."""
    given = several(adapters)
    if given is None:
        raise InvalidArgumentError(
            f"adapters must be pairs of an Adapter and its scale, got {shown(adapters)}"
        )
    pairs: list[tuple[Adapter, float]] = []
    for each in given:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], Adapter)):
            raise InvalidArgumentError(
                f"adapters must be pairs of an Adapter and its scale, got {shown(each)}"
            )
        adapter, scale = each[0], real(each[1], "the scale of an adapter", -MOST_SCALE, MOST_SCALE)
        if any(adapter is other for other, _ in pairs):
            raise InvalidArgumentError(f"{adapter.path} is given twice")
        pairs.append((adapter, scale))
    return tuple(pairs)


def checked_adapters(adapters: Any) -> Active:
    """pairs_of(), those of scale 0 left out, in an order of their own: lists that mean the same are equal.

    Raises InvalidArgumentError.
    """
    pairs = pairs_of(adapters)
    active = [(adapter, scale) for adapter, scale in pairs if scale != 0.0]
    if len(active) > MOST_ADAPTERS:
        raise InvalidArgumentError(f"at most {MOST_ADAPTERS} adapters take part together, got {len(active)}")
    return tuple(sorted(active, key=lambda pair: (pair[0].digest, pair[1])))


def set_adapters(
    context: int, adapters: Sequence[tuple[Adapter, float]], pointers: tuple[int, ...] = ()
) -> None:
    """For Handle.call() of a context. Raises what Context.set_adapters() raises."""
    if len(pointers) < len(adapters):
        adapter, _ = adapters[len(pointers)]
        adapter._handle.call(lambda pointer: set_adapters(context, adapters, (*pointers, pointer)))
        return
    scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
    lib().kvg_context_set_adapters(
        context, (ctypes.c_void_p * len(pointers))(*pointers), scales, len(pointers)
    )


def key_of(adapters: Iterable[tuple[Adapter, float]]) -> bytes:
    """What K and V depend on of checked adapters: 32 bytes, the same in every process; b"" for none."""
    entries = [adapter.digest + struct.pack("<f", scale) for adapter, scale in adapters]
    if not entries:
        return b""
    with importing:
        import hashlib
    return hashlib.sha256(_FORMAT + b"".join(entries)).digest()


def _read_info(adapter: int) -> KvgAdapterInfo:
    info = sized(KvgAdapterInfo)
    lib().kvg_adapter_get_info(adapter, ctypes.byref(info))
    return info


def _digest(adapter: int) -> bytes:
    """By the open file's descriptor: another file may have its name by now."""
    fd = lib().kvg_gguf_fd(lib().kvg_adapter_gguf(adapter), 0)
    with importing:
        import hashlib
    digest, offset = hashlib.sha256(), 0
    while part := os.pread(fd, _READ_BYTES, offset):
        digest.update(part)
        offset += len(part)
    return digest.digest()

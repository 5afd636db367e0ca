"""Values of a file's metadata keys that somebody gives in their place, as llama.cpp's --override-kv does."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from pykvgraph._native.ffi import KvgOverride, KvgOverrideType
from pykvgraph._native.library import sized
from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError

Overrides: TypeAlias = "Mapping[str, bool | int | float | str]"
_LONGEST = 127  # bytes of a key and of a text, in libllama


def checked_overrides(overrides: Any) -> dict[str, bool | int | float | str]:
    """The same as a dict; None: an empty one. Raises InvalidArgumentError, which names the key."""
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise InvalidArgumentError(f"kv_overrides must map keys to values, got {shown(overrides)}")
    checked: dict[str, bool | int | float | str] = {}
    for key, value in overrides.items():
        _require_text(key, "a key of kv_overrides", may_be_empty=False)
        name = f"kv_overrides[{key!r}]"
        if isinstance(value, str):
            _require_text(value, name, may_be_empty=True)
        elif isinstance(value, int):  # bool, too
            if not -(2**63) <= value < 2**63:
                raise InvalidArgumentError(f"{name} must fit into 64 bits, got {shown(value)}")
        elif not isinstance(value, float) or not math.isfinite(value):
            raise InvalidArgumentError(f"{name} must be a bool, an int, a float or a str, got {shown(value)}")
        checked[key] = value
    return checked


def _require_text(text: Any, name: str, *, may_be_empty: bool) -> None:
    if not isinstance(text, str) or "\0" in text or not (text or may_be_empty):
        raise InvalidArgumentError(f"{name} must be a text without NUL, got {shown(text)}")
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name} has half a character: {error}") from None
    if n_bytes > _LONGEST:
        raise InvalidArgumentError(f"{name} has {n_bytes} bytes, and libllama takes {_LONGEST} at most")


def native_overrides(overrides: Overrides) -> ctypes.Array[KvgOverride]:
    """For kvg_gguf_open and kvg_model_params, of checked ones."""
    array = (KvgOverride * len(overrides))()
    for place, (key, value) in zip(array, overrides.items(), strict=True):
        fields: dict[str, Any]
        if isinstance(value, bool):
            fields = {"type": KvgOverrideType.KVG_OVERRIDE_BOOL, "integer": value}
        elif isinstance(value, int):
            fields = {"type": KvgOverrideType.KVG_OVERRIDE_INT, "integer": value}
        elif isinstance(value, float):
            fields = {"type": KvgOverrideType.KVG_OVERRIDE_FLOAT, "number": value}
        else:
            fields = {"type": KvgOverrideType.KVG_OVERRIDE_STR, "text": value.encode()}
        filled = sized(KvgOverride, key=key.encode(), **fields)
        for name, *_ in KvgOverride._fields_:
            setattr(place, name, getattr(filled, name))
    return array


def set_in_libllama(array: Any, overrides: Overrides) -> None:
    """Fills the first items of an array of libllama's structs."""
    for place, (key, value) in zip(array, overrides.items(), strict=False):
        place.key = key.encode()
        if isinstance(value, bool):
            place.tag, place.value.val_bool = _LLAMA_BOOL, value
        elif isinstance(value, int):
            place.tag, place.value.val_i64 = _LLAMA_INT, value
        elif isinstance(value, float):
            place.tag, place.value.val_f64 = _LLAMA_FLOAT, value
        else:
            place.tag, place.value.val_str = _LLAMA_STR, value.encode()


_LLAMA_INT, _LLAMA_FLOAT, _LLAMA_BOOL, _LLAMA_STR = range(4)  # llama_model_kv_override_type

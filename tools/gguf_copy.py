"""Copies of a GGUF file with fewer layers, or with tensors that do nothing."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER = re.compile(r"^blk\.(\d+)\.")


class Source:
    """A file to copy from. arch: its architecture. n_layer: how many layers it has. names: of its tensors."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self.arch = str(self._value("general.architecture"))
        self.n_layer = int(self._value(f"{self.arch}.block_count"))
        self.names = [tensor.name for tensor in self._reader.tensors]

    def keys(self) -> dict[str, Any]:
        """What the file says of its architecture, but for lists and for what is 0 or off."""
        prefix = f"{self.arch}."
        found = {
            key.removeprefix(prefix): self._value(key)
            for key in self._reader.fields
            if key.startswith(prefix)
        }
        return {key: value for key, value in found.items() if value and not isinstance(value, list)}

    def of_layer(self, layer: int) -> list[str]:
        """The names of its tensors."""
        return [name for name in self.names if name.startswith(f"blk.{layer}.")]

    def write(self, path: Path, n_layer: int, neutral: Collection[str] = ()) -> Path:
        """A copy with the first n_layer layers; `neutral` norms, scales, factors are ones, others zeros."""
        writer = gguf.GGUFWriter(path, self.arch)
        for key, field in self._reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                value = self._cut(key, field.contents(), n_layer)
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                if value != []:  # the package writes no empty lists
                    writer.add_key_value(key, value, field.types[0], sub_type=inner)
        for tensor in self._reader.tensors:
            layer = LAYER.match(tensor.name)
            if layer is None or int(layer[1]) < n_layer:
                data = _neutral(tensor) if tensor.name in neutral else tensor.data
                writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _value(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def _cut(self, key: str, value: Any, n_layer: int) -> Any:
        if key == f"{self.arch}.block_count":
            return n_layer
        of_layers = key.startswith(f"{self.arch}.") and isinstance(value, list) and len(value) == self.n_layer
        return value[:n_layer] if of_layers else value


def _neutral(tensor: gguf.ReaderTensor) -> Any:
    """Blocks of zero bytes are zeros in every type."""
    multiplies = "norm" in tensor.name or tensor.name.endswith(".scale") or "rope" in tensor.name
    if multiplies and not tensor.name.endswith(".bias"):
        return np.ones_like(tensor.data)
    return np.zeros_like(tensor.data)

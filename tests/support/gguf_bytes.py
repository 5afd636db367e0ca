"""GGUF files by hand, for what no honest writer would write."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

# GGUF's value types
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
F32 = 0  # ggml's tensor type


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


@dataclass
class RawGguf:
    """A file's parts as bytes; counts and offsets are written as given, right or not."""

    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None  # None: as many as there are
    n_keys: int | None = None
    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""

    def key(self, name: str | bytes, kind: int, value: bytes) -> None:
        self.keys.append(text(name) + struct.pack("<I", kind) + value)

    def tensor(self, name: str | bytes, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> None:
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        self.tensors.append(text(name) + dims + struct.pack("<IQ", kind, offset))

    def write(self, path: Path) -> Path:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        head += b"".join(self.keys) + b"".join(self.tensors)
        path.write_bytes(head + b"\0" * (-len(head) % 32) + self.data)
        return path

"""A GGUF file taken apart: keys, tensors and data as Python objects, to be changed and written again."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import TypeAlias

from support.gguf_bytes import ARRAY, FLOAT32, STRING, RawGguf, text

BOOL, FLOAT64 = 7, 12
# GGUF's integer types -> bytes, signed
INTEGERS = {0: (1, False), 1: (1, True), 2: (2, False), 3: (2, True), 4: (4, False), 5: (4, True)} | {
    10: (8, False),
    11: (8, True),
}
KINDS = [*INTEGERS, FLOAT32, BOOL, STRING, FLOAT64]
ALIGNMENT = 32

Scalar: TypeAlias = "int | float | bytes"


@dataclass
class Key:
    """`kind` is the value's type, or that of an array's items when `value` is a list."""

    name: bytes
    kind: int
    value: Scalar | list[Scalar]


@dataclass
class Tensor:
    name: bytes
    shape: list[int]  # innermost first
    kind: int
    data: bytes
    shift: int = 0  # added to the right offset


@dataclass
class Parts:
    keys: list[Key] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def find(self, name: str) -> Key | None:
        return next((key for key in self.keys if key.name == name.encode()), None)

    def set(self, name: str, kind: int, value: Scalar | list[Scalar]) -> None:
        """Gives a key this type and value, whether it was there or not."""
        key = self.find(name)
        if key is None:
            self.keys.append(Key(name.encode(), kind, value))
        else:
            key.kind, key.value = kind, value

    def raw(self) -> RawGguf:
        """The file, its counts and offsets right unless a part says otherwise."""
        raw = RawGguf()
        for key in self.keys:
            if isinstance(key.value, list):
                head = struct.pack("<IQ", key.kind, len(key.value))
                raw.key(key.name, ARRAY, head + b"".join(encode(key.kind, item) for item in key.value))
            else:
                raw.key(key.name, key.kind, encode(key.kind, key.value))
        for tensor in self.tensors:
            offset = (len(raw.data) + tensor.shift) % 2**64
            raw.tensor(tensor.name, tuple(extent % 2**64 for extent in tensor.shape), tensor.kind, offset)
            raw.data += tensor.data + b"\0" * (-len(tensor.data) % ALIGNMENT)
        return raw


def encode(kind: int, value: Scalar) -> bytes:
    """A value as GGUF's type `kind`, wrapped around or made up where it doesn't fit."""
    if kind == STRING:
        return text(value if isinstance(value, bytes) else str(value))
    number = float(len(value)) if isinstance(value, bytes) else value
    if kind == FLOAT64:
        return struct.pack("<d", number)
    if kind == FLOAT32:
        fits = abs(number) < 3e38 or math.isnan(number)
        return struct.pack("<f", number if fits else math.copysign(math.inf, number))
    whole = int(number) if math.isfinite(number) else 0
    size = INTEGERS[kind][0] if kind in INTEGERS else 1
    return (whole % (1 << 8 * size)).to_bytes(size, "little")


def decode(kind: int, data: bytes, at: int) -> tuple[Scalar, int]:
    """The value at `at`, and where it ends."""
    if kind == STRING:
        (length,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + length], at + 8 + length
    if kind in (FLOAT32, FLOAT64):
        size = 8 if kind == FLOAT64 else 4
        return struct.unpack_from("<d" if kind == FLOAT64 else "<f", data, at)[0], at + size
    size, signed = INTEGERS.get(kind, (1, False))
    return int.from_bytes(data[at : at + size], "little", signed=signed), at + size


def take_apart(data: bytes) -> Parts:
    """Parses a sound file whose tensors lie one after the other."""
    parts = Parts()
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(n_keys):
        name, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        value: Scalar | list[Scalar]
        if kind == ARRAY:
            kind, n = struct.unpack_from("<IQ", data, at)
            at += 12
            value = []
            for _ in range(n):
                item, at = decode(kind, data, at)
                value.append(item)
        else:
            value, at = decode(kind, data, at)
        parts.keys.append(Key(name, kind, value))
    offsets = []
    for _ in range(n_tensors):
        name, at = _string(data, at)
        (n_dims,) = struct.unpack_from("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{n_dims}QIQ", data, at + 4)
        at += 4 + 8 * n_dims + 12
        parts.tensors.append(Tensor(name, shape, kind, b""))
        offsets.append(offset)
    start = at + -at % ALIGNMENT
    for tensor, begin, end in zip(parts.tensors, offsets, [*offsets[1:], len(data) - start], strict=True):
        tensor.data = data[start + begin : start + end]
    return parts


def _string(data: bytes, at: int) -> tuple[bytes, int]:
    value, at = decode(STRING, data, at)
    assert isinstance(value, bytes)
    return value, at

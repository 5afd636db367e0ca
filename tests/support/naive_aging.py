"""A llama in float64 whose K and V are rounded as rows that age, by the definition of types."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
import numpy.typing as npt

from support.models import ModelSpec
from support.naive_llama import Floats, Rows, naive_logits


def aged(rows: npt.NDArray[np.float32], old: str) -> npt.NDArray[np.float32]:
    """Rows in F16 as they are read once they have gone to another type, by gguf's own quantization."""
    kind = gguf.GGMLQuantizationType[old.upper()]
    found: npt.NDArray[np.float32] = gguf.dequantize(gguf.quantize(rows, kind), kind)
    return found


def walsh(n: int) -> Floats:
    """The orthonormal Walsh-Hadamard matrix, n a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(n)
    return matrix


class NaiveAging:
    """One text. Heads must be a power of two, at most 64.

    mixes: rows are rounded after heads were multiplied by a Walsh-Hadamard matrix. Rows are kept without it:
    it is orthonormal, so that products of Q and K are the same with it as without.
    """

    def __init__(self, spec: ModelSpec, old: str, *, mixes: bool) -> None:
        self._spec, self._old = spec, old
        self._mix = walsh(spec.k_dim) if mixes else np.eye(spec.k_dim)
        self._rows: list[Rows] = []  # of each layer, as they are read

    def age(self) -> None:
        """All rows so far."""
        self._rows = [(self._as_old(k), self._as_old(v)) for k, v in self._rows]

    def decode(self, ids: Sequence[int]) -> Floats:
        """The logits of the last of them."""
        past, new = self._rows, list[Rows]()
        n = len(past[0][0]) if past else 0
        logits = naive_logits(self._spec, ids, past=past, pos0=n, rows=new, stored=self._as_fresh)
        pairs = zip(past, new, strict=True) if past else []
        self._rows = [(np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])) for a, b in pairs] or new
        last: Floats = logits[-1]
        return last

    def _as_fresh(self, rows: Floats) -> Floats:
        read: Floats = (rows @ self._mix).astype(np.float16).astype(np.float64) @ self._mix
        return read

    def _as_old(self, rows: Floats) -> Floats:
        flat = (rows @ self._mix).reshape(len(rows), -1).astype(np.float32)
        read: Floats = aged(flat, self._old).astype(np.float64).reshape(rows.shape) @ self._mix
        return read

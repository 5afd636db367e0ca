"""A llama in float64 whose K and V are rounded as rows that age, by the definition of types."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
import numpy.typing as npt

from support.models import ModelSpec, random_tensors

Floats = npt.NDArray[np.float64]


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
    """One text. Heads must be a power of two, at most 64, and layers alike."""

    def __init__(self, spec: ModelSpec, old: str, *, mixes: bool) -> None:
        self.spec, self.old = spec, old
        self.weights = {name: tensor.astype(np.float64) for name, tensor in random_tensors(spec).items()}
        self.mix = walsh(spec.k_dim) if mixes else np.eye(spec.k_dim)
        # of each layer K, then V: (n, n_head_kv, k_dim), mixed
        self.rows: list[list[Floats]] = [
            [np.zeros((0, spec.n_head_kv, spec.k_dim))] * 2 for _ in range(spec.n_layer)
        ]

    def age(self) -> None:
        """All rows so far."""
        for layer in self.rows:
            for i, rows in enumerate(layer):
                flat = rows.reshape(len(rows), -1).astype(np.float32)
                layer[i] = np.array(aged(flat, self.old), np.float64).reshape(rows.shape)

    def decode(self, ids: Sequence[int]) -> Floats:
        """The logits of the last of them."""
        w = self.weights
        x = w["token_embd.weight"][list(ids)]
        for layer in range(self.spec.n_layer):
            own = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"blk.{layer}.")}
            x = (
                x
                + self._attention(layer, own, normed(x, own["attn_norm.weight"]))
                @ own["attn_output.weight"].T
            )
            h = normed(x, own["ffn_norm.weight"])
            gate = h @ own["ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ own["ffn_up.weight"].T)) @ own["ffn_down.weight"].T
        logits: Floats = normed(x[-1], w["output_norm.weight"]) @ w["output.weight"].T
        return logits

    def _attention(self, layer: int, w: dict[str, Floats], x: Floats) -> Floats:
        spec, n = self.spec, len(x)
        first = len(self.rows[layer][0])
        positions = np.arange(first, first + n)
        q = turned(spec, (x @ w["attn_q.weight"].T).reshape(n, -1, spec.k_dim), positions) @ self.mix
        k = turned(spec, (x @ w["attn_k.weight"].T).reshape(n, -1, spec.k_dim), positions) @ self.mix
        v = (x @ w["attn_v.weight"].T).reshape(n, -1, spec.k_dim) @ self.mix
        for i, fresh in enumerate((k, v)):
            stored = fresh.astype(np.float16).astype(np.float64)
            self.rows[layer][i] = np.concatenate([self.rows[layer][i], stored])
        k, v = (rows.repeat(spec.n_head // spec.n_head_kv, axis=1) for rows in self.rows[layer])
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(spec.k_dim)
        scores = np.where(np.arange(len(k))[None] <= positions[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        gathered: Floats = (np.einsum("hij,jhd->ihd", weights, v) @ self.mix).reshape(n, -1)
        return gathered


def normed(x: Floats, weight: Floats) -> Floats:
    y: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight
    return y


def turned(spec: ModelSpec, heads: Floats, positions: npt.NDArray[np.int64]) -> Floats:
    """(n, n_heads, k_dim), each at its own position: neighbours are a pair."""
    angles = positions[:, None] * spec.rope_base ** (-np.arange(0, spec.k_dim, 2) / spec.k_dim)
    pairs = (heads[..., 0::2] + 1j * heads[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(heads.shape)

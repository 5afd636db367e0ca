"""MiniLM's vectors as its authors' description has them: BERT in NumPy, of the published weights themselves.

Nothing here reads the GGUF file, or knows of libllama.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
N_LAYER, N_HEAD, EPSILON = 6, 12, 1e-12


def _erf(x: Floats) -> Floats:
    """Abramowitz and Stegun's 7.1.26: within 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    terms = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    sums = t * np.polyval(terms[::-1], t)
    signed: Floats = np.sign(x) * (1 - sums * np.exp(-x * x))
    return signed


class MiniLm:
    """The published encoder."""

    def __init__(self, weights: Path, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
        self._ids = {word: id for id, word in enumerate(words)}
        data = weights.read_bytes()
        n = int.from_bytes(data[:8], "little")
        self._weights: dict[str, Floats] = {}
        told: dict[str, Any] = json.loads(data[8 : 8 + n])
        for name, each in told.items():
            if name != "__metadata__" and each["dtype"] == "F32":
                begin, end = (8 + n + offset for offset in each["data_offsets"])
                values = np.frombuffer(data[begin:end], "<f4").reshape(each["shape"])
                self._weights[name] = values.astype(np.float64)

    def tokens(self, text: str) -> list[int]:
        """Words in small letters without accents, punctuation apart, each by the longest pieces there are."""
        plain = unicodedata.normalize("NFD", text.lower())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        apart = "".join(f" {c} " if self._is_punctuation(c) else c for c in plain)
        pieces = [piece for word in apart.split() for piece in self._pieces(word)]
        return [self._ids[piece] for piece in ("[CLS]", *pieces, "[SEP]")]

    def vector(self, text: str) -> Floats:
        """The mean of the last states, of length 1."""
        ids = self.tokens(text)
        x = self._of("embeddings.word_embeddings")[ids]
        x = x + self._of("embeddings.position_embeddings")[: len(ids)]
        x = self._normed("embeddings.LayerNorm", x + self._of("embeddings.token_type_embeddings")[0])
        for layer in range(N_LAYER):
            x = self._layer(f"encoder.layer.{layer}.", x)
        mean: Floats = x.mean(axis=0)
        mean /= np.linalg.norm(mean)
        return mean

    def _layer(self, name: str, x: Floats) -> Floats:
        heads = {part: self._heads(f"{name}attention.self.{part}", x) for part in ("query", "key", "value")}
        scores = heads["query"] @ heads["key"].transpose(0, 2, 1) / np.sqrt(heads["query"].shape[-1])
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        seen = shares / shares.sum(axis=-1, keepdims=True) @ heads["value"]
        joined = seen.transpose(1, 0, 2).reshape(x.shape)
        x = x + self._linear(f"{name}attention.output.dense", joined)
        x = self._normed(f"{name}attention.output.LayerNorm", x)
        wide = self._linear(f"{name}intermediate.dense", x)
        wide = wide * (1 + _erf(wide / np.sqrt(2))) / 2
        return self._normed(f"{name}output.LayerNorm", x + self._linear(f"{name}output.dense", wide))

    def _heads(self, name: str, x: Floats) -> Floats:
        heads: Floats = self._linear(name, x).reshape(len(x), N_HEAD, -1).transpose(1, 0, 2)
        return heads

    def _linear(self, name: str, x: Floats) -> Floats:
        product: Floats = x @ self._of(name).T + self._weights[f"{name}.bias"]
        return product

    def _normed(self, name: str, x: Floats) -> Floats:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled: Floats = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)
        scaled = scaled * self._of(name) + self._weights[f"{name}.bias"]
        return scaled

    def _of(self, name: str) -> Floats:
        return self._weights[f"{name}.weight"]

    @staticmethod
    def _is_punctuation(c: str) -> bool:
        return unicodedata.category(c).startswith("P") or c in "$+<=>^`|~"

    def _pieces(self, word: str) -> list[str]:
        pieces, begin = list[str](), 0
        while begin < len(word):
            mark = "##" if begin else ""
            end = next((e for e in range(len(word), begin, -1) if mark + word[begin:e] in self._ids), 0)
            if not end:
                return ["[UNK]"]
            pieces.append(mark + word[begin:end])
            begin = end
        return pieces

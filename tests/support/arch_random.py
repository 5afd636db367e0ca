"""Random weights of matrices, biases and norms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from support.arch_spec import ArchSpec

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]


class Random:
    """Weights with the widths of a spec."""

    def __init__(self, spec: ArchSpec) -> None:
        self.spec = spec
        self.rng = np.random.default_rng(spec.seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> Array:
        weights = self.rng.standard_normal(shape, dtype=np.float32)
        weights *= gain / np.sqrt(shape[-1])
        return weights

    def bias(self, *shape: int, scale: float = 0.1) -> Array:
        weights = self.rng.standard_normal(shape, dtype=np.float32)
        weights *= scale
        return weights

    def norm(self, n: int) -> Array:
        weights = self.bias(n)
        weights += 1
        return weights

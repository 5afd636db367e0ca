"""Muon, as Keller Jordan describes it (https://kellerjordan.github.io/posts/muon), for many small matrices.

torch.optim.Muon takes one matrix at a time, in bfloat16; where a CPU has no bfloat16, that takes as long as
all else in a step of a small model. Here matrices of one shape are one tensor, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM, DECAY = 0.95, 0.02
N_STEPS = 5
QUINTIC = 3.4445, -4.7750, 2.0315  # its coefficients bring singular values near 1 within five steps


def orthogonal(x: Tensor) -> Tensor:
    """x (n, rows, columns): nearly the orthogonal matrices next to it, by Newton and Schulz."""
    is_tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(N_STEPS):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(1, 2) if is_tall else x


class Muon:
    """For matrices that aren't embeddings or outputs; updates have the size that AdamW's would have."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for weight in weights:
            by_shape.setdefault(weight.shape, []).append(weight)
        self._alike = list(by_shape.values())
        self._momentum = [torch.zeros(len(each), *each[0].shape) for each in self._alike]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Follows the gradients, at a learning rate, and forgets them."""
        for weights, momentum in zip(self._alike, self._momentum, strict=True):
            gradient = torch.stack([weight.grad for weight in weights])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            change = orthogonal(gradient.lerp(momentum, MOMENTUM)) * 0.2 * math.sqrt(max(gradient.shape[1:]))
            for weight, own in zip(weights, change, strict=True):
                weight.mul_(1 - rate * DECAY).sub_(own, alpha=rate)
                weight.grad = None

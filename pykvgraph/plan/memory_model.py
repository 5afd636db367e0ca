"""Memory as a linear model, in the form of IBM's text-generation-inference-server (TGIS), and its limits.

TGIS learns five coefficients when it starts, and decides by them. Here nothing is decided by them: engines
lay out a context of any size exactly, in milliseconds (fitting.py). Only `pykvgraph plan` learns the
coefficients, of such plans, and tells them. The limits (weight_limit, speculation_limit) hold for all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from pykvgraph.checks import integer
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.plan.least_squares import non_negative
from pykvgraph.plan.memory import plan_memory

SPECULATION_SHARE = 0.75  # of cells or memory, that may be used with drafts
_SIZES = (256, 512, 768, 1024, 1536, 2048)  # tokens, of plans that are learned from; cells come in 256


class PrefillSample(NamedTuple):
    """Bytes that are taken while n_texts prompts of n_tokens each are computed at once."""

    n_texts: int
    n_tokens: int
    n_bytes: int


class NextTokenSample(NamedTuple):
    """Bytes that n_texts take, each a prompt of n_in tokens and an answer of n_out."""

    n_texts: int
    n_in: int
    n_out: int
    n_bytes: int


@dataclass(frozen=True)
class MemoryModel:
    """Prompts of B texts of S tokens take max(a·B·S, b·B·S + c·B·S²) bytes, later d·B·in + e·B·out.

    prompt_line: a. prompt, prompt_square: b and c. n_in, n_out: d and e. None is negative.
    """

    prompt_line: float
    prompt: float
    prompt_square: float
    n_in: float
    n_out: float

    @classmethod
    def fit(cls, samples: Sequence[PrefillSample | NextTokenSample]) -> MemoryModel:
        """By least squares of the relative errors. Raises InvalidArgumentError without samples of both."""
        prompts = [each for each in samples if isinstance(each, PrefillSample)]
        later = [each for each in samples if isinstance(each, NextTokenSample)]
        if not prompts or not later:
            raise InvalidArgumentError("samples: there must be a PrefillSample and a NextTokenSample")
        of_prompts = [each.n_bytes for each in prompts]
        line = non_negative([(each.n_texts * each.n_tokens,) for each in prompts], of_prompts)
        squares = [(b * s, b * s * s) for b, s, _ in prompts]
        sums = [(b * n_in, b * n_out) for b, n_in, n_out, _ in later]
        of_later = non_negative(sums, [each.n_bytes for each in later])
        return cls(*line, *non_negative(squares, of_prompts), *of_later)

    def prefill(self, n_texts: int, n_tokens: int) -> float:
        """Bytes while n_texts prompts of n_tokens each are computed."""
        curve = self.prompt * n_tokens + self.prompt_square * n_tokens**2
        return n_texts * max(self.prompt_line * n_tokens, curve)

    def next_token(self, n_in: int, n_out: int) -> float:
        """Bytes of texts with n_in tokens of prompts and n_out of answers in all."""
        return self.n_in * n_in + self.n_out * n_out


def weight_limit(free_bytes: int, margin: int) -> int:
    """Bytes that may be taken of what is free: floor((1 - margin / 100) · free)."""
    return free_bytes * (100 - margin) // 100


def speculation_limit(limit: int, share: float = SPECULATION_SHARE) -> int:
    """How much of a limit may be used with drafts; others may need the rest. share: from 0 to 1."""
    return int(integer(limit, "limit") * Fraction(share))


def learn_memory(path: str | os.PathLike[str], **arguments: Any) -> MemoryModel:
    """The model of a file: of exact plans of one text, whose prompt is one micro-batch.

    arguments: those of plan_memory, without n_ctx, n_batch and n_ubatch. Bytes are of all devices, weights
    not counted. Raises what plan_memory raises.
    """
    arguments = {k: v for k, v in arguments.items() if k not in ("n_ctx", "n_batch", "n_ubatch")}
    samples: list[PrefillSample | NextTokenSample] = []
    for n in _SIZES:
        parts = plan_memory(path, n_ctx=n, n_batch=n, n_ubatch=n, **arguments)
        cells = sum(part.cache_bytes for part in parts)
        samples.append(PrefillSample(1, n, cells + sum(part.compute_bytes for part in parts)))
        samples += [NextTokenSample(1, n, 0, cells), NextTokenSample(1, 0, n, cells)]
    return MemoryModel.fit(samples)

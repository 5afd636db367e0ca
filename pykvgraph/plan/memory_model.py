"""Memory as a linear model, in the form of IBM's text-generation-inference-server (TGIS).

What decides here are exact plans (fitting.py). The model tells in a few numbers what they say: bytes of a
token in the cache, and of a token of a prompt.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from pykvgraph.checks import integer
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.plan.least_squares import non_negative
from pykvgraph.plan.memory import plan_memory

SPECULATION_SHARE = 0.75  # of cells or memory, that may be used with drafts
_SPARE = 5  # per cent, of a recommended margin
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

    @property
    def coefficients(self) -> tuple[float, ...]:
        """a, b, c, d, e."""
        return astuple(self)

    @property
    def ratio(self) -> float:
        """How many cells' bytes a token of a prompt takes: a / e; 0.0 when cells take none."""
        return self.prompt_line / self.n_out if self.n_out else 0.0

    def prefill(self, n_texts: int, n_tokens: int) -> float:
        """Bytes while n_texts prompts of n_tokens each are computed."""
        curve = self.prompt * n_tokens + self.prompt_square * n_tokens**2
        return n_texts * max(self.prompt_line * n_tokens, curve)

    def next_token(self, n_in: int, n_out: int) -> float:
        """Bytes of texts with n_in tokens of prompts and n_out of answers in all."""
        return self.n_in * n_in + self.n_out * n_out

    def longest_prompt(self, limit_bytes: int, n_texts: int = 1) -> float:
        """How long n_texts prompts may be within limit_bytes, in tokens each; inf: they take none."""
        most = limit_bytes / n_texts
        bounds = [math.inf]
        if self.prompt_line:
            bounds.append(most / self.prompt_line)
        if self.prompt_square:  # b·S + c·S² = most, in the form that loses no digits where c is small
            root = math.sqrt(self.prompt**2 + 4 * self.prompt_square * most)
            bounds.append(2 * most / (self.prompt + root))
        elif self.prompt:
            bounds.append(most / self.prompt)
        return min(bounds)

    def n_blocks(self, limit_bytes: int, n_tokens: int = 32) -> float:
        """How many blocks of so many cells limit_bytes have room for; inf: cells take none."""
        return limit_bytes // (self.n_out * n_tokens) if self.n_out else math.inf


def weight_limit(free_bytes: int, margin: int) -> int:
    """Bytes that may be taken of what is free: floor((1 - margin / 100) · free)."""
    return free_bytes * (100 - margin) // 100


def recommended_margin(next_token: float, prefill: float) -> int:
    """The margin with which prompts find room, too: 5 + int(100 · (1 - (1 - nt) / (1 - pf))); 0: any will do.

    next_token, prefill: nt and pf, the shares of the free memory that are left when the cache is full, and
    while a prompt is computed that fills it.
    """
    if prefill >= next_token:
        return 0
    # what is 20 in numbers without end is 19.999999999999996 in floats
    return _SPARE + int(100 * (1 - (1 - next_token) / (1 - prefill)) + 1e-9)


def speculation_limit(limit: int, share: float = SPECULATION_SHARE) -> int:
    """How much of a limit may be used with drafts; others may need the rest. share: from 0 to 1."""
    return int(integer(limit, "limit") * Fraction(share))


def allows_speculation(batch_bytes: int, limit_bytes: int) -> bool:
    """Whether drafts may be decoded beside a batch. Raises InvalidArgumentError."""
    batch_bytes, limit_bytes = integer(batch_bytes, "batch_bytes"), integer(limit_bytes, "limit_bytes")
    return batch_bytes <= speculation_limit(limit_bytes)


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

"""How many of several workers read prompts, and how many decode: DéjàVu's planner (arXiv 2403.01876)."""

from __future__ import annotations

import math
from typing import NamedTuple

from pykvgraph.checks import integer, real


class Roles(NamedTuple):
    """Numbers of workers."""

    prefill: int
    decode: int


def split_workers(
    n_workers: int, prompt_seconds: float, token_seconds: float, n_tokens: float, overhead: float = 1.0
) -> Roles:
    """The split with which neither waits for the other: Dt = ceil(D N t / (m Y + N t)), at least one of each.

    n_workers: D, at least 2. prompt_seconds: Y, of one worker for a usual prompt. token_seconds: t, for a
    token of it. n_tokens: N, that a usual answer has. overhead: m, how much longer a prompt takes because it
    is streamed (`pykvgraph bench --cache stream`). Raises InvalidArgumentError.
    """
    n = integer(n_workers, "n_workers", 2)
    reading = real(overhead, "overhead", 1, 1e3) * real(prompt_seconds, "prompt_seconds", 1e-9, 1e9)
    decoding = real(n_tokens, "n_tokens", 1, 1e9) * real(token_seconds, "token_seconds", 1e-9, 1e9)
    decode = min(n - 1, math.ceil(n * decoding / (reading + decoding)))
    return Roles(n - decode, decode)

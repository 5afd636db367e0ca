"""Requests that share a prefix, some at a time: how many tokens a second, and how long each one waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pykvgraph.engine import Engine
from pykvgraph.model import Model
from pykvgraph.params import SamplingParams

N_REQUESTS = 24
N_AT_A_TIME = 8
N_ANSWER = 64


@dataclass(frozen=True)
class Served:
    """What N_REQUESTS requests took, N_AT_A_TIME of them at a time.

    n_prompt: tokens of all prompts. n_decoded: all tokens that were decoded, of answers too. speed: tokens of
    answers in a second. first: seconds from a request to its first token, of each request. gaps: seconds from
    a token to the next one of the same request.
    """

    n_prompt: int
    n_decoded: int
    speed: float
    first: Sequence[float]
    gaps: Sequence[float]


def write_prompts(model: Model, n_shared: int) -> list[list[int]]:
    """Prompts of random tokens: n_shared that all have, then from an eighth of that to as many own ones."""
    rng = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return [int(token) for token in rng.integers(0, model.n_vocab, n)]

    shared = ids(n_shared)
    return [shared + ids(int(rng.integers(n_shared // 8, n_shared + 1))) for _ in range(N_REQUESTS)]


def n_cells(prompts: Sequence[Sequence[int]]) -> int:
    """Cells for all of them, so that none is given up."""
    return sum(len(prompt) + N_ANSWER for prompt in prompts)


def serve(engine: Engine, prompts: Sequence[Sequence[int]]) -> Served:
    """Each of N_AT_A_TIME clients asks one thing after the other, for the likeliest N_ANSWER tokens."""
    first: list[float] = []
    gaps: list[float] = []
    params = SamplingParams(max_tokens=N_ANSWER)

    def ask(own: Sequence[Sequence[int]]) -> None:
        for prompt in own:
            times = [time.perf_counter()]
            times += [time.perf_counter() for _ in engine.submit(prompt, params)]
            waits = np.diff(times).tolist()
            first.append(waits[0])
            gaps.extend(waits[1:])

    before = engine.stats().decoded_tokens
    clients = [
        threading.Thread(target=ask, args=(prompts[i::N_AT_A_TIME],), daemon=True) for i in range(N_AT_A_TIME)
    ]
    start = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = time.perf_counter() - start
    n_decoded = engine.stats().decoded_tokens - before
    speed = (len(first) + len(gaps)) / seconds
    return Served(sum(map(len, prompts)), n_decoded, speed, first, gaps)

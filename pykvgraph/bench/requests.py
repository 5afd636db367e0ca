"""Requests of several clients: how many tokens a second they get, and how long each one waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pykvgraph.bench.servers import Client
from pykvgraph.engine import Engine
from pykvgraph.model.model import Model
from pykvgraph.params.params import SamplingParams

N_REQUESTS = 24
N_AT_A_TIME = 8
N_ANSWER = 64  # tokens

Prompt = Sequence[int]
Ask = Callable[[Prompt], Iterator[int]]  # yields when tokens are there, and how many


@dataclass(frozen=True)
class Served:
    """What requests took.

    n_prompt: tokens of all prompts. n_decoded: all tokens that were decoded, of answers too. speed: tokens of
    answers in a second. first: seconds from a request to its first token, of each request. gaps: seconds from
    a token to the next one of the same request.
    """

    n_prompt: int
    n_decoded: int
    speed: float
    first: Sequence[float]
    gaps: Sequence[float]


def write_prompts(
    model: Model, n_shared: int, own: tuple[int, int], n_requests: int = N_REQUESTS
) -> list[list[int]]:
    """Prompts of random tokens: n_shared that all have, then own ones: from own[0] to own[1] of them."""
    rng = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return [int(token) for token in rng.integers(0, model.n_vocab, n)]

    shared = ids(n_shared)
    return [shared + ids(int(rng.integers(own[0], own[1] + 1))) for _ in range(n_requests)]


def n_cells(prompts: Sequence[Prompt]) -> int:
    """Cells for all of them, so that none is given up."""
    return sum(len(prompt) + N_ANSWER for prompt in prompts)


def serve(engine: Engine, prompts: Sequence[Prompt]) -> Served:
    """N_AT_A_TIME clients ask an engine for the likeliest N_ANSWER tokens."""
    params = SamplingParams(max_tokens=N_ANSWER)
    before = engine.stats().decoded_tokens
    speed, first, gaps = _ask_all(
        lambda prompt: (1 for _ in engine.submit(prompt, params)), prompts, N_AT_A_TIME
    )
    n_decoded = engine.stats().decoded_tokens - before
    return Served(sum(map(len, prompts)), n_decoded, speed, first, gaps)


def serve_over_http(client: Client, prompts: Sequence[Prompt], n_clients: int) -> Served:
    """So many clients ask a server for N_ANSWER tokens. Raises what Client.complete does."""
    decoded: list[int] = []

    def ask(prompt: Prompt) -> Iterator[int]:
        for event in client.complete(prompt, N_ANSWER):
            if event["tokens"]:
                yield len(event["tokens"])
            if "timings" in event:
                decoded.append(event["timings"]["prompt_n"] + event["timings"]["predicted_n"] - 1)

    speed, first, gaps = _ask_all(ask, prompts, n_clients)
    return Served(sum(map(len, prompts)), sum(decoded), speed, first, gaps)


def _ask_all(ask: Ask, prompts: Sequence[Prompt], n_clients: int) -> tuple[float, list[float], list[float]]:
    """Each client asks one thing after the other. Tokens a second, waits for first tokens, and gaps."""
    first: list[float] = []
    gaps: list[float] = []
    n_tokens: list[int] = []
    errors: list[BaseException] = []

    def be_client(own: Sequence[Prompt]) -> None:
        try:
            for prompt in own:
                times = [time.perf_counter()]
                for n in ask(prompt):
                    times.append(time.perf_counter())
                    n_tokens.append(n)
                waits = np.diff(times).tolist()
                first.append(waits[0])
                gaps.extend(waits[1:])
        except BaseException as error:
            errors.append(error)

    clients = [
        threading.Thread(target=be_client, args=(prompts[i::n_clients],), daemon=True)
        for i in range(n_clients)
    ]
    start = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if errors:
        raise errors[0]
    return sum(n_tokens) / (time.perf_counter() - start), first, gaps

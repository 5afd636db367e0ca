"""--cache-reuse beside llama-server: as many tokens come from the cache, and the same ones are said."""

from __future__ import annotations

from typing import Any

import httpx
from support.served import llama_server, served

import pykvgraph as kvg

from .conftest import STORIES

LEAST = 8


def load() -> kvg.Engine:
    return kvg.Engine(kvg.Model(STORIES, "cpu"), n_ctx=512, n_seq_max=1, cache_reuse=LEAST)


def prompts() -> list[list[int]]:
    """A text whose front is given up bit by bit, as an editor's does around the cursor; then one of parts."""
    tokenizer = kvg.Model(STORIES, "cpu").tokenizer
    story = "Once upon a time, there was a girl named Lily. She loved to play outside with her big red ball. "
    story += (
        "One day, the ball fell into the pond, and a green frog came up to say hello. Lily was very sad. "
    )
    old = tokenizer.encode(story * 2)[:120]
    shorter = [old[:1] + old[n : n + 90] for n in (1, 9, 20, 31)]
    parts = shorter[-1][:10] + shorter[-1][25:50] + shorter[-1][60:90] + old[5:20]
    return [*shorter, parts, parts[:20] + parts[22:26] + parts[40:]]


def say(client: httpx.Client, prompt: list[int]) -> tuple[list[int], Any]:
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "return_tokens": True}
    told = client.post("/completion", json=body).json()
    return told["tokens"], told["timings"]["cache_n"]


def test_as_llama_server() -> None:
    arguments = ("-c", "512", "-np", "1", "--cache-reuse", str(LEAST))
    with (
        llama_server(STORIES, *arguments) as rival,
        served(load, n_slots=1) as (url, _),
        httpx.Client(base_url=rival, timeout=60) as theirs,
        httpx.Client(base_url=url, timeout=60) as ours,
    ):
        told = [(say(theirs, prompt), say(ours, prompt)) for prompt in prompts()]
    for (their_tokens, their_n), (our_tokens, our_n) in told:
        assert (our_tokens, our_n) == (their_tokens, their_n)
    assert [n for (_, n), _ in told][1] > 80

"""serve --prefix-compress, and a body's cache_compressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models import SMALL, ModelSpec
from support.served import served_alone

N = 544
PROMPTS = [[3 + i * i % 200 for i in range(N)] + [n] * 20 for n in range(3, 8)]


@pytest.fixture
def serve(model_file: Callable[[ModelSpec], Path]) -> Iterator[httpx.Client]:
    options = ("-c", "2048", "-np", "2", "--prefix-compress", "0.5")
    with (
        served_alone(model_file(SMALL), *options) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, prompt: list[int], **fields: Any) -> httpx.Response:
    return client.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    )


def edited(client: httpx.Client, **fields: Any) -> int:
    return int(ask(client, PROMPTS[3], **fields).json()["usage"]["cache"]["edited"])


def test_a_body_says_whether_it_takes_it(serve: httpx.Client) -> None:
    for prompt in PROMPTS[:3]:
        assert ask(serve, prompt, cache_compressed=True).json()["usage"]["cache"]["edited"] == 0
    end = time.monotonic() + 60
    while not (n := edited(serve, cache_compressed=True)):
        assert time.monotonic() < end
        time.sleep(0.3)  # idle time
    assert N - 64 < n <= N
    assert edited(serve) == edited(serve, cache_compressed=False) == 0
    told = ask(serve, PROMPTS[3], cache_compressed="yes")
    assert told.status_code == 400
    assert "cache_compressed" in told.json()["error"]["message"]

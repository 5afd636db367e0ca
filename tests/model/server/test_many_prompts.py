"""Bodies with thousands of prompts: a limit, and others are answered while they wait and go away."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.served import events, served, where_of

from .conftest import load

MOST = 6000


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[str, Any]]:
    with served(load, n_ctx_slot=128, max_prompts=MOST, embeddings=True, pooling="mean") as (url, server):
        yield url, server


@pytest.fixture(scope="module")
def few() -> Iterator[str]:
    """The address of a server that takes three prompts."""
    with served(load, max_prompts=3, n_slots=2, embeddings=True, pooling="mean") as (url, _):
        yield url


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


class Looker(threading.Thread):
    """Asks /health again and again; longest: seconds until an answer."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._where = where_of(url)
        self._ends = threading.Event()
        self.longest = 0.0
        self.n = 0
        self.start()

    def run(self) -> None:
        while not self._ends.wait(0.01):
            begin = time.monotonic()
            one = http.client.HTTPConnection(*self._where, timeout=120)
            one.request("GET", "/health")
            assert one.getresponse().status == 200
            one.close()
            self.longest = max(self.longest, time.monotonic() - begin)
            self.n += 1

    def end(self) -> None:
        self._ends.set()
        self.join(120)


def until_idle(server: Any) -> None:
    engine = server.service.engine
    end = time.monotonic() + 60
    while engine.stats().n_running or engine.stats().n_waiting or server.service.slots.n_deferred:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_others_are_answered_while_thousands_wait_and_go_away(target: tuple[str, Any], streams: bool) -> None:
    url, server = target
    until_idle(server)
    looker = Looker(url)
    prompts = [[i % 200 + 5] for i in range(MOST)]
    with socket.create_connection(where_of(url)) as client:
        client.sendall(post("/v1/completions", {"prompt": prompts, "max_tokens": 60, "stream": streams}))
        while server.service.slots.n_deferred < MOST // 2:
            time.sleep(0.01)
        while looker.n < 20:
            time.sleep(0.01)
    talk = httpx.post(f"{url}/completion", json={"prompt": "Once", "n_predict": 4}, timeout=120)
    assert talk.status_code == 200
    until_idle(server)
    looker.end()
    assert looker.longest < 2


def test_whoever_comes_later_needs_not_wait_for_a_long_list(target: tuple[str, Any]) -> None:
    """The engine has no more of it than it needs to go on."""
    url, server = target
    until_idle(server)
    stats = server.service.engine.stats
    with socket.create_connection(where_of(url)) as client:
        client.sendall(
            post("/v1/completions", {"prompt": [[5 + i % 9] for i in range(MOST)], "max_tokens": 5})
        )
        while server.service.slots.n_deferred < MOST - 100:
            assert stats().n_running + stats().n_waiting <= 40
            time.sleep(0.001)
        reply = httpx.post(f"{url}/completion", json={"prompt": "Once", "n_predict": 2}, timeout=60)
        assert reply.status_code == 200
        assert server.service.slots.n_deferred > 1000
    until_idle(server)


@pytest.mark.parametrize("streams", [False, True])
def test_each_prompt_of_many_has_its_answer(target: tuple[str, Any], streams: bool) -> None:
    """As it has alone; over 64 of them: the event loop goes on meanwhile."""
    url, _ = target
    prompts = [[i % 50 + 300, i % 7 + 300] for i in range(200)]
    greedy = {"max_tokens": 3, "temperature": 0}
    alone = {}
    for prompt in prompts[:3]:
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, **greedy}, timeout=60)
        alone[tuple(prompt)] = reply.json()["choices"][0]["text"]
    body = {"prompt": prompts, "stream": streams, **greedy}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    said = [""] * len(prompts)
    ended = [0] * len(prompts)
    told = events(reply.text)[:-1] if streams else [reply.json()]
    for choice in (choice for each in told for choice in each["choices"]):
        said[choice["index"]] += choice["text"]
        ended[choice["index"]] += choice["finish_reason"] is not None
    assert ended == [1] * len(prompts)
    for prompt, text in zip(prompts, said, strict=True):
        assert text == alone.get(tuple(prompt), text)
    assert len(set(said)) > 20


def test_vectors_of_many_texts_are_those_of_each_alone(target: tuple[str, Any]) -> None:
    url, _ = target
    texts = [[i % 40 + 300, i % 3 + 300] for i in range(100)]
    for path, key in (("/v1/embeddings", "data"), ("/embedding", "")):
        reply = httpx.post(f"{url}{path}", json={"input" if key else "content": texts}, timeout=60).json()
        told = reply[key] if key else reply
        assert [each["index"] for each in told] == list(range(100))
        for i in (0, 17, 99):
            one = httpx.post(f"{url}{path}", json={"input" if key else "content": [texts[i]]}).json()
            alone = (one[key] if key else one)[0]["embedding"]
            assert np.allclose(told[i]["embedding"], alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/completion", "prompt"),
        ("/completions", "prompt"),
        ("/v1/completions", "prompt"),
        ("/embedding", "content"),
        ("/embeddings", "input"),
        ("/v1/embeddings", "input"),
    ],
)
def test_more_prompts_than_the_limit(few: str, path: str, name: str) -> None:
    for prompts, n, code in (
        (["a"] * 3, 1, 200),
        (["a"] * 4, 1, 400),
        ([[5, 6]] * 4, 1, 400),
        (["a", [5]], 2, 400),
        ([5, 6, 7, 8, "a"], 1, 200),  # one prompt
    ):
        body: dict[str, Any] = {name: prompts, "n_predict": 1, "max_tokens": 1}
        if n > 1 and name == "prompt":
            body["n"] = n
        elif n > 1:
            continue
        reply = httpx.post(f"{few}{path}", json=body, timeout=60)
        assert reply.status_code == code, reply.text
        if code == 400:
            message = reply.json()["error"]["message"]
            assert str(len(prompts) * n) in message and " 3: " in message and "--max-prompts" in message
            assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_large_logit_bias_for_many_prompts(target: tuple[str, Any]) -> None:
    """Each answer has its own, and tells it."""
    url, _ = target
    bias = [[token, 1] for token in range(400)]
    body = {"prompt": [[5]] * 3000, "logit_bias": bias, "n_predict": 1}
    reply = httpx.post(f"{url}/completion", json=body, timeout=60)
    assert reply.status_code == 400 and "logit_bias" in reply.json()["error"]["message"]
    body["prompt"] = [[5]] * 3
    assert httpx.post(f"{url}/completion", json=body, timeout=60).status_code == 200

"""What clients do wrong: each hears of it, and nobody else does."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from support.served import served

from .conftest import load

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {
        "prompt": [1, 403, "Once"],
        "n_predict": 2,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "logit_bias": [[5, -1.5], ["a", False]],
        "samplers": ["top_k", "temperature"],
        "seed": 3,
        "n_cmpl": 2,
        "response_fields": ["content"],
        "n_probs": 2,
    },
    "/v1/completions": {"prompt": ["a", [1, 2]], "max_tokens": 2, "n": 2, "logprobs": 1, "stream": True},
    "/v1/chat/completions": {
        "messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_object", "schema": {"type": "integer"}},
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/tokenize": {"content": ["a", 5], "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 403]},
    "/apply-template": {"messages": MESSAGES},
}
ODD: list[Any] = [
    None, True, -1, 0, 10**30, -(2**63), 1.5, 1e308, "", "\ud800", "\0", "é" * 50, [], {}, [[]], [None],
    {"": {}},
    {"function": {}}, [{"type": "text"}], "root ::= root", {"type": {"type": []}}, [[1, 2, 3]], [[0, True]],
]  # fmt: skip


def where_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def places(value: Any) -> list[list[Any]]:
    """The way to everything in a JSON value."""
    found: list[list[Any]] = [[]]
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        found += [[key, *way] for way in places(child)]
    return found


def mutated(body: dict[str, Any], rng: random.Random) -> Any:
    changed: Any = {"": copy.deepcopy(body)}
    for _ in range(rng.choice([1, 1, 2, 3])):
        *way, last = rng.choice([["", *way] for way in places(changed[""])])
        inside = changed
        for key in way:
            inside = inside[key]
        if way and rng.random() < 0.2:
            del inside[last]
        elif isinstance(inside, dict) and rng.random() < 0.2:
            inside[rng.choice(["grammar", "json_schema", "mirostat", "samplers", "stop", "n"])] = rng.choice(
                ODD
            )
        else:
            inside[last] = copy.deepcopy(rng.choice(ODD))
    return changed[""]


@pytest.mark.parametrize("seed", range(3))
def test_mutated_bodies(client: httpx.Client, seed: int) -> None:
    rng = random.Random(seed)
    codes = set()
    for _ in range(60):
        path = rng.choice(list(BODIES))
        body = mutated(BODIES[path], rng)
        if isinstance(body, dict) and "n_predict" not in body and "max_tokens" not in body:
            body["n_predict"] = 2
        data = json.dumps(body).encode()
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data) + 1)] + bytes([rng.randrange(256)])
        code = client.post(path, content=data).status_code
        assert code == 200 or code in range(400, 500) or code == 501, (path, body, code)
        codes.add(code)
    assert {200, 400} <= codes
    assert client.get("/health").status_code == 200


def test_deep_and_long_bodies(client: httpx.Client) -> None:
    deep = b'{"prompt":' + b"[" * 30_000 + b"]" * 30_000 + b"}"
    assert client.post("/completion", content=deep).status_code == 400
    long = client.post("/completion", content=b" " * (1 << 17))
    assert (long.status_code, long.json()["error"]["code"]) == (413, 413)

    def parts() -> Any:
        for _ in range(100):
            yield b" " * 4096

    assert client.post("/completion", content=parts()).status_code == 413


def test_what_is_refused_by_name(client: httpx.Client) -> None:
    for name, value in (("dry_multiplier", 1), ("xtc_probability", 0.5), ("post_sampling_probs", True)):
        reply = client.post("/completion", json={"prompt": "a", name: value})
        assert reply.status_code == 501 and name in reply.json()["error"]["message"]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]
    assert client.post("/v1/chat/completions", json={"messages": picture}).status_code == 501
    wrong: list[tuple[str, Any]] = [("temperature", "hot"), ("n", 9), ("stream", 1), ("samplers", ["none"])]
    for field, bad in wrong:
        reply = client.post("/completion", json={"prompt": "a", field: bad})
        assert reply.status_code == 400 and field in reply.json()["error"]["message"]


def test_slow_and_idle_clients() -> None:
    with served(load, idle_seconds=0.3, body_seconds=0.3, max_connections=20) as (url, _):
        where = where_of(url)
        idle = [socket.create_connection(where) for _ in range(30)]
        half = socket.create_connection(where)
        half.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Le")
        slow = socket.create_connection(where)
        slow.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert httpx.post(f"{url}/completion", json={"prompt": "a", "n_predict": 2}).status_code == 200
        slow.settimeout(10)
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
        for each in (*idle, half):
            each.settimeout(10)
            assert each.recv(1) == b""  # closed
        endless = socket.create_connection(where)
        with pytest.raises(OSError):
            for _ in range(1000):
                endless.sendall(b"GET /health HTTP/1.1\r\nA: " if _ == 0 else b"a" * 4096)
                time.sleep(0.001)
        for each in (*idle, half, slow, endless):
            each.close()


@pytest.mark.parametrize("streams", [False, True])
def test_who_goes_away_ends_the_request(streams: bool) -> None:
    with served(load) as (url, server):
        engine = server.service.engine
        body = json.dumps({"prompt": "Once", "ignore_eos": True, "stream": streams}).encode()
        with engine._loop._stepping:  # the engine stands still
            client = socket.create_connection(where_of(url))
            client.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
            client.sendall(body)
            while not server.service.slots.n_processing:
                time.sleep(0.001)
            client.close()
            while server.service.slots.n_processing:
                time.sleep(0.001)
        while engine.stats().n_running or engine.stats().n_waiting:
            time.sleep(0.001)
        assert engine.stats().decoded_tokens <= 8  # of 512


def test_it_drains_and_a_second_signal_ends_it() -> None:
    fields = {"prompt": "Once", "ignore_eos": True, "n_predict": 300}
    with served(load) as (url, server):
        with server.service.engine._loop._stepping:
            found: list[Any] = []
            asks = threading.Thread(target=lambda: found.append(httpx.post(f"{url}/completion", json=fields)))
            asks.start()
            while not server.service.slots.n_processing:
                time.sleep(0.001)
            server.stop()
        asks.join(30)
        assert found[0].json()["tokens_predicted"] == 300
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
        server.should_exit = True


def test_the_second_stop_waits_for_nobody() -> None:
    with served(load) as (url, server):
        body = b'{"prompt":"Once","ignore_eos":true}'
        with server.service.engine._loop._stepping:  # an answer that takes for ever
            client = socket.create_connection(where_of(url))
            client.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
            client.sendall(body)
            while not server.service.slots.n_processing:
                time.sleep(0.001)
            server.stop()
            server.stop()
            client.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        client.close()

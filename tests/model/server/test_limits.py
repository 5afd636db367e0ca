"""What clients do wrong: each hears of it, and nobody else does."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from support.served import served, where_of

from .conftest import load

HI = [{"role": "user", "content": "Hi"}]
LONG_LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": LONG_LIST}}
IN_TOOL = {"type": "object", "properties": {"a": LONG_LIST}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": IN_TOOL}}]


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
    reply = client.post("/completion", json={"prompt": "a", "grammar_lazy": True})
    assert reply.status_code == 501 and "grammar_lazy" in reply.json()["error"]["message"]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]
    assert client.post("/v1/chat/completions", json={"messages": picture}).status_code == 400
    wrong: list[tuple[str, Any]] = [("temperature", "hot"), ("n", 9), ("stream", 1), ("samplers", ["none"])]
    for field, bad in wrong:
        reply = client.post("/completion", json={"prompt": "a", field: bad})
        assert reply.status_code == 400 and field in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/completion", "n_probs", {"prompt": "a"}),
        ("/v1/completions", "logprobs", {"prompt": "a"}),
        ("/v1/chat/completions", "top_logprobs", {"messages": HI, "logprobs": True}),
    ],
)
def test_how_many_likely_tokens_are_told(
    client: httpx.Client, path: str, name: str, fields: dict[str, Any]
) -> None:
    """All 262,144 of a vocabulary took 0.9 s for each token, in which nobody got the next one."""
    asked = {**fields, "max_tokens": 1}
    assert client.post(path, json=asked | {name: 1000}).status_code == 200
    reply = client.post(path, json=asked | {name: 1001})
    assert reply.status_code == 400 and name in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/completion", {"prompt": "a", "json_schema": LONG_LIST}),
        ("/v1/completions", {"prompt": "a", "json_schema": LONG_LIST}),
        ("/v1/chat/completions", {"messages": HI, "response_format": FORM}),
        ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "tool_choice": "required"}),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": LONG_LIST}}}),
    ],
)
def test_a_schema_that_repeats_a_million_times(
    client: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    begin = time.process_time()
    reply = client.post(path, json=fields)
    assert reply.status_code == 400
    assert "minItems is 1000000, over the limit of 65536" in reply.json()["error"]["message"]
    assert time.process_time() - begin < 1.5  # the server is a thread of this process


@pytest.mark.parametrize("shape", [list, dict])
def test_biases_of_all_tokens_and_of_more(client: httpx.Client, shape: type) -> None:
    """The vocabulary has 512 tokens."""
    pairs: list[Any] = [[token, False if token != 300 else 1] for token in range(512)]
    fields = {"prompt": "a", "n_predict": 2, "return_tokens": True}
    named = {str(token): bias for token, bias in pairs}
    said = client.post("/completion", json=fields | {"logit_bias": pairs if shape is list else named})
    assert said.json()["tokens"] == [300, 300]
    many = [*pairs, [5, 0.5]] if shape is list else named | {"none": 0.5}
    for path in ("/completion", "/v1/completions"):
        reply = client.post(path, json=fields | {"logit_bias": many})
        told = "Field 'logit_bias': has 513 pairs, and the model 512 tokens"
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, told)


@pytest.mark.parametrize("field", ["stop", "response_fields", "dry_sequence_breakers"])
def test_strings_that_are_many_or_long(field: str) -> None:
    """Each is looked for in each token, or gone through for each answer, while others wait."""
    with served(load) as (url, _):

        def asked(texts: list[str]) -> httpx.Response:
            return httpx.post(f"{url}/completion", json={"prompt": "a", "n_predict": 2, field: texts})

        for texts in (["Z"] * 1025, ["Z" * 40_000, "Z" * 25_537]):
            reply = asked(texts)
            assert reply.status_code == 400
            assert f"Field '{field}': " in reply.json()["error"]["message"]
        assert asked(["Z"] * (64 if "dry" in field else 1024)).status_code == 200
        assert asked(["Z" * 40_000, "Z" * 25_536]).status_code == 200


@pytest.mark.parametrize("part", [b"[]", b"{}", b'""', b'"[{\\"[{"'])
def test_a_body_of_many_parts(part: bytes) -> None:
    """While json makes them nobody else runs: 20 million arrays took 9 seconds."""
    with served(load) as (url, _):

        def asked(n: int) -> httpx.Response:
            body = b'{"x":[%b],"prompt":"a"}' % b",".join([part] * n)
            return httpx.post(f"{url}/apply-template", content=body, timeout=30)

        # beside them: an object, an array, two names and a text
        assert "'messages' is required" in asked((1 << 20) - 5).json()["error"]["message"]
        reply = asked((1 << 20) - 4)
        assert reply.status_code == 400
        assert "1048576 strings, arrays and objects" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "pair", [[5, 10**400], [5, -(10**400)], [5, 1e300], [5, -1e300], [10**400, 1], [-1, 1], ["", 1]]
)
def test_numbers_of_biases_that_are_large(client: httpx.Client, pair: list[Any]) -> None:
    fields = {"prompt": "a", "n_predict": 2, "return_tokens": True, "logit_bias": [pair]}
    said = client.post("/completion", json=fields).json()["tokens"]
    assert (said == [5, 5]) == (pair[0] == 5 and pair[1] > 0)


def test_many_tools_with_long_schemas() -> None:
    schema = {"type": "object", "properties": {f"{'p' * 200}{i}": {} for i in range(200)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(40)]
    with served(load) as (url, _):
        fields = {"messages": HI, "tools": tools, "tool_choice": "required"}
        reply = httpx.post(f"{url}/v1/chat/completions", json=fields, timeout=30)
    assert reply.status_code == 400 and "tools" in reply.json()["error"]["message"]


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


def test_a_connection_that_asks_again_and_again_stays() -> None:
    with served(load, idle_seconds=0.6) as (url, _):
        one = http.client.HTTPConnection(*where_of(url), timeout=10)
        one.connect()
        one.auto_open = 0  # it raises when the server has closed it
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            one.request("GET", "/health")
            assert one.getresponse().read() == b'{"status":"ok"}'
            time.sleep(0.02)
        assert one.sock is not None and one.sock.recv(1) == b""  # closed now
        one.close()


def test_a_routers_headers_are_its_own(client: httpx.Client) -> None:
    """Nobody else's words are heard there, of whatever an answer would be."""
    body = {"prompt": "Once upon a time", "n_predict": 12, "temperature": 0}
    said = client.post("/completion", json=body).json()["content"]
    names = ("reads", "tells", "said", "copy-to", "run")
    headers = {f"x-kvgraph-{name}": "1" for name in names}
    forged = client.post("/completion", json=body | {"x_kvgraph_said": [5, 6, 7]}, headers=headers)
    assert forged.json()["content"] == said
    stream = client.post("/completion", json=body | {"stream": True}, headers=headers)
    assert ":said" not in stream.text

"""Connections: what a client has closed of its own, and bodies that are too long."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from typing import Any

import httpx
import pytest
from support.served import events, served, where_of

from pykvgraph.server.run import Server

from .conftest import load

LONG: dict[str, Any] = {"prompt": "Once", "ignore_eos": True, "n_predict": 400, "temperature": 0}


def connected(url: str) -> socket.socket:
    client = socket.create_connection(where_of(url))
    client.settimeout(30)
    return client


def sent(url: str, fields: dict[str, Any], *, version: bytes = b"1.1") -> socket.socket:
    """A connection on which this was asked."""
    body = json.dumps(fields).encode()
    client = connected(url)
    client.sendall(
        b"POST /completion HTTP/%b\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (version, len(body))
    )
    client.sendall(body)
    return client


def answer(client: socket.socket) -> tuple[int, bytes]:
    reply = http.client.HTTPResponse(client)
    reply.begin()
    return reply.status, reply.read()


def wait_for_work(server: Server) -> None:
    while not server.service.slots.n_processing:
        time.sleep(0.001)


def end_of_work(server: Server) -> None:
    until = time.monotonic() + 20
    while server.service.slots.n_processing:
        assert time.monotonic() < until, "a client has gone, and its request goes on"
        time.sleep(0.001)


@pytest.mark.parametrize("streams", [False, True])
def test_who_closes_its_side_gets_the_answer(streams: bool) -> None:
    with served(load) as (url, server):
        with server.service.engine._loop._stepping:  # nothing is said yet
            client = sent(url, LONG | {"stream": streams})
            client.shutdown(socket.SHUT_WR)
            wait_for_work(server)
            time.sleep(0.05)
        code, text = answer(client)
        assert client.recv(1) == b""  # closed behind it
        client.close()
        assert code == 200
        last = events(text.decode())[-1] if streams else json.loads(text)
        assert last["tokens_predicted"] == 400
        assert server.service.engine.stats().n_running == 0


def test_requests_behind_each_other_are_all_answered() -> None:
    with served(load) as (url, _), connected(url) as client:
        body = json.dumps(LONG | {"n_predict": 8}).encode()
        request = b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        client.sendall(request * 3)
        client.shutdown(socket.SHUT_WR)
        data = b""
        while part := client.recv(1 << 16):
            data += part
        assert data.count(b'"tokens_predicted":8') == 3


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("closes", ["closes", "resets"])
def test_who_has_left_ends_the_request(version: bytes, closes: str) -> None:
    """While the engine stands still: nothing is written to the client that it could be noticed by."""
    with served(load) as (url, server):
        with server.service.engine._loop._stepping:
            client = sent(url, LONG, version=version)
            wait_for_work(server)
            if closes == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.close()
            end_of_work(server)
        assert server.service.engine.stats().decoded_tokens <= 8


def test_who_leaves_after_closing_its_side() -> None:
    """A stream that has begun: the next event shows it."""
    with served(load) as (url, server):
        client = sent(url, LONG | {"stream": True, "n_predict": 500})
        client.shutdown(socket.SHUT_WR)
        data = b""
        while b"data: " not in data:
            data += client.recv(100)
        with server.service.engine._loop._stepping:
            client.close()
        end_of_work(server)
        assert server.service.engine.stats().decoded_tokens < 490


def test_half_a_request_is_none() -> None:
    with served(load) as (url, _):
        for data in (b"POST /comp", b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"):
            client = connected(url)
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
            client.close()


LIMIT = 1 << 16


def refusal(client: socket.socket) -> dict[str, Any]:
    code, text = answer(client)
    error: dict[str, Any] = json.loads(text)["error"]
    assert code == error["code"] == 413 and str(LIMIT) in error["message"]
    return error


@pytest.mark.parametrize("path", ["/completion", "/v1/embeddings", "/lora-adapters"])
def test_the_head_of_a_long_request_is_refused(path: str, address: str) -> None:
    """No byte of the body has come then."""
    with connected(address) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 200000000\r\n"
        client.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
        begin = time.monotonic()
        refusal(client)
        assert time.monotonic() - begin < 4


def test_a_client_that_sends_all_of_it_reads_the_refusal(address: str) -> None:
    with connected(address) as client:
        size = 1000 * LIMIT
        client.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(1000):
            client.sendall(b" " * LIMIT)
        refusal(client)


def test_chunks_beyond_the_limit_are_refused(address: str) -> None:
    with connected(address) as client:
        client.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(5):
            client.sendall(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        refusal(client)  # although the body goes on


def test_a_body_of_just_the_limit_is_read(address: str) -> None:
    body = b'{"prompt":"a","n_predict":1}'
    for spaces, code in ((LIMIT - len(body), 200), (LIMIT - len(body) + 1, 413)):
        with connected(address) as client:
            length = len(body) + spaces
            client.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length)
            client.sendall(body + b" " * spaces)
            assert answer(client)[0] == code


def answered(url: str, data: bytes) -> bytes:
    """What comes back when so much is sent as the server takes."""
    with socket.create_connection(where_of(url), timeout=20) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
        came = b""
        with contextlib.suppress(OSError):
            while part := client.recv(1 << 16):
                came += part
        return came


@pytest.mark.parametrize(("n", "size", "is_taken"), [(5000, 1, False), (3000, 1, True), (20_000, 16, True)])
def test_bodies_in_small_parts(n: int, size: int, is_taken: bool) -> None:
    """Each part is read by Python: a few connections full of them took seconds of everybody's time."""
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served(load, max_body=1 << 20) as (url, _):
        came = answered(url, head + b"2\r\n{}\r\n" + chunk * n + b"0\r\n\r\n")
    assert came.startswith(b"HTTP/1.1 200 " if is_taken else b"HTTP/1.1 400 ")


@pytest.mark.parametrize(("n", "is_taken"), [(60, True), (5000, False)])
def test_requests_that_are_sent_at_once(address: str, n: int, is_taken: bool) -> None:
    get, last = b"GET /health HTTP/1.1\r\nHost: a\r\n", b"Connection: close\r\n\r\n"
    came = answered(address, (get + b"\r\n") * (n - 1) + get + last)
    assert (came.count(b"HTTP/1.1 200 ") == n) == is_taken
    assert (came.count(b"HTTP/1.1 400 ") == 0) == is_taken


def test_long_bodies_share_their_memory() -> None:
    """Clients that send the most of a long body and no more leave room for short ones, and then for all."""
    size = 1 << 20
    content = b'{"content":"%b"}' % (b" " * (size - 14))
    post = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with served(load, max_body=size) as (url, _), contextlib.ExitStack() as slow:
        for _ in range(4):
            client = slow.enter_context(socket.create_connection(where_of(url), timeout=20))
            client.sendall(post % size + content[:-100_000])
        assert until_it_is(429, url, post % size + content)
        assert answered(url, post % 2 + b"{}").startswith(b"HTTP/1.1 200 ")
        slow.close()
        assert until_it_is(200, url, post % size + content)


def until_it_is(code: int, url: str, data: bytes) -> bool:
    """Whether an answer has this code within some seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if answered(url, data).startswith(b"HTTP/1.1 %d " % code):
            return True
    return False


def test_headers_have_the_names_of_their_standards(client: httpx.Client) -> None:
    # one connection: each answer on it has a head of its own
    asked = [
        client.build_request("GET", "/health", headers={"Origin": "http://a.example"}),
        client.build_request("POST", "/completion", json={"prompt": "Once", "n_predict": 2, "stream": True}),
        client.build_request("GET", "/metrics"),
        client.build_request("GET", "/nothing-here", headers={"Connection": "close"}),
    ]
    names = [{name.decode() for name, _ in client.send(each).headers.raw} for each in asked]
    assert {"Content-Type", "Content-Length", "Access-Control-Allow-Origin", "Vary"} <= names[0]
    assert {"Content-Type", "Transfer-Encoding"} <= names[1]
    assert "Process-Start-Time-Unix" in names[2]
    assert {"Content-Type", "Content-Length", "Connection"} <= names[3]


def test_a_client_that_waits_for_100_continue_gets_it_and_the_names(address: str) -> None:
    client = connected(address)
    body = json.dumps({"content": "Once"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % len(body))
    assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(body)
    told = client.recv(1000)
    assert told.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Type: application/json" in told
    client.close()

"""Clients that ask a server for what it must refuse, or leave before it is done.

    python benchmarks/hostile_clients.py http://127.0.0.1:8080 60

200 of them, for 60 seconds, each in a thread; between two requests a client pauses for 2 seconds, about. At
the end: JSON, what each kind of request was answered, by code; 0: the connection was closed, -1: nothing came
while the client was there.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import shapes  # noqa: F401 puts tests/ on the path
from support.hostile_requests import request_of, send
from support.served import where_of

N = 200
PAUSE = 2.0  # seconds, on average
PATIENCE = 20.0  # seconds that a client waits for an answer, at most
Where = tuple[str, int]
Attack = Callable[[Where, random.Random], int]


def post(path: str, body: Any, length: int | None = None) -> bytes:
    """As it is sent. length: that is announced, where it is a lie."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    n = len(data) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {n}\r\n\r\n".encode() + data
    )


def answered(where: Where, data: bytes, seconds: float = PATIENCE) -> int:
    try:
        return send(where, data, seconds).code
    except TimeoutError:
        return -1


def left(where: Where, data: bytes, seconds: float) -> int:
    """The client leaves after so many seconds, whatever it has been told by then."""
    with socket.create_connection(where, PATIENCE) as client:
        client.settimeout(PATIENCE)
        client.sendall(data)
        client.settimeout(max(seconds, 0.001))
        try:
            head = client.recv(64)
        except TimeoutError:
            return -1
    return int(head.split(b" ")[1]) if head.startswith(b"HTTP/") else 0


def list_of_prompts(where: Where, rng: random.Random) -> int:
    prompts = [[rng.randrange(300) + 5] for _ in range(rng.choice([100, 1000, 2048, 2049, 20_000]))]
    body = {"prompt": prompts, "max_tokens": rng.choice([1, 50]), "stream": rng.random() < 0.5}
    return left(where, post("/v1/completions", body), rng.uniform(0, 6))


def list_of_texts(where: Where, rng: random.Random) -> int:
    texts = ["a cat and a dog " * rng.randrange(1, 9) for _ in range(rng.choice([10, 1000, 3000]))]
    return left(where, post("/v1/embeddings", {"input": texts}), rng.uniform(0, 6))


def huge_body(where: Where, rng: random.Random) -> int:
    n = rng.choice([100_000, 1_000_000, 8_000_000])
    kinds: list[tuple[str, Any]] = [
        ("/completion", {"prompt": "word " * (n // 5), "n_predict": 1}),
        ("/completion", {"prompt": [7] * (n // 3), "n_predict": 1}),
        ("/tokenize", {"content": "word " * (n // 5)}),
        ("/completion", b'{"prompt":' + b"[" * n),
    ]
    return answered(where, post(*rng.choice(kinds)))


def false_length(where: Where, rng: random.Random) -> int:
    return left(where, post("/completion", {"prompt": "a"}, 200_000_000), rng.uniform(0, 3))


def long_talk(where: Where, rng: random.Random) -> int:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "ok"} for i in range(rng.choice([99, 9999]))
    ]
    body = {"messages": [*messages, {"role": "user", "content": "Hi"}], "max_tokens": 2}
    return left(where, post("/v1/chat/completions", body), rng.uniform(0, 6))


def bad_schema(where: Where, rng: random.Random) -> int:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(rng.choice([20, 400])):
        deep = {"type": "array", "items": deep, "minItems": 2}
    schemas: list[Any] = [
        {"type": "string", "pattern": "^" + "(a|b)*" * rng.choice([10, 40]) + "$"},
        {"type": "array", "items": {"type": "integer"}, "minItems": rng.choice([1000, 1_000_000])},
        {"$ref": "#"},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
        deep,
        {"type": ["no", 5]},
    ]
    wanted = {"type": "json_schema", "json_schema": {"schema": rng.choice(schemas)}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "response_format": wanted}
    return left(where, post("/v1/chat/completions", body), rng.uniform(0, 10))


def large_bias(where: Where, rng: random.Random) -> int:
    bias = [[i % 40_000, 1.5] for i in range(rng.choice([1000, 100_000, 1_000_000]))]
    return answered(where, post("/completion", {"prompt": "a", "n_predict": 2, "logit_bias": bias}))


def leaves(where: Where, rng: random.Random) -> int:
    body = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 400, "stream": True}
    return left(where, post("/v1/chat/completions", body), rng.expovariate(2))


def half_closed(where: Where, rng: random.Random) -> int:
    """The client has said all, and closes its side; it waits for the answer."""
    with socket.create_connection(where, PATIENCE) as client:
        client.sendall(post("/completion", {"prompt": "Once", "n_predict": 4}))
        client.shutdown(socket.SHUT_WR)
        client.settimeout(PATIENCE)
        try:
            head = client.recv(64)
        except TimeoutError:
            return -1
    return int(head.split(b" ")[1]) if head.startswith(b"HTTP/") else 0


def damaged(where: Where, rng: random.Random) -> int:
    return answered(where, request_of(rng))


ATTACKS: list[Attack] = [
    *(list_of_prompts, list_of_texts, huge_body, false_length, long_talk),
    *(bad_schema, large_bias, leaves, half_closed, damaged),
]


def attack(where: Where, seed: int, end: float, found: Counter[tuple[str, int]]) -> None:
    """One client."""
    rng = random.Random(seed)
    while time.monotonic() + (pause := rng.expovariate(1 / PAUSE)) < end:
        time.sleep(pause)
        does = rng.choice(ATTACKS)
        try:
            code = does(where, rng)
        except OSError:
            code = 0
        found[does.__name__, code] += 1


def main() -> None:
    # they would be on other machines: they take what time of the processors is left
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    url, seconds = sys.argv[1], float(sys.argv[2])
    found, end = Counter[tuple[str, int]](), time.monotonic() + seconds
    clients = [
        threading.Thread(target=attack, args=(where_of(url), seed, end, found), daemon=True)
        for seed in range(N)
    ]
    for each in clients:
        each.start()
    for each in clients:
        each.join(max(end + PATIENCE - time.monotonic(), 0))
    told: dict[str, dict[str, int]] = {does.__name__: {} for does in ATTACKS}
    for (name, code), n in sorted(found.copy().items()):
        told[name][str(code)] = n
    print(json.dumps(told))


if __name__ == "__main__":
    main()

"""Whatever a client sends, it hears 200, 4xx, 501 or 503 in JSON; others are answered; memory is bounded."""

from __future__ import annotations

import itertools
import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import chance, sanitizer
from support.hostile_requests import BODIES, GETS, request_of, send
from support.served import served, served_alone, where_of

from pykvgraph.server.http.keys import PUBLIC

from .conftest import STORIES, load

ASKED = {"prompt": "Once upon a time", "n_predict": 24, "temperature": 0}
N_MEGABYTES = 48  # that 10,000 requests may leave behind
N_SLOW = 1_000 if sanitizer.ADDRESS else 10_000 // chance.SHARE


def ask(url: str, **fields: Any) -> str:
    reply = httpx.post(f"{url}/completion", json={**ASKED, **fields}, timeout=120)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["content"])


def attack(url: str, seed: int, n: int) -> Counter[int]:
    rng, codes = random.Random(chance.seed(seed)), Counter[int]()
    for _ in range(n):
        data = request_of(rng)
        answer = send(where_of(url), data)
        assert answer.is_right, (data, answer)
        codes[answer.code] += 1
    return codes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(tmp_path_factory.mktemp("slots"))
    limits: dict[str, Any] = {"body_seconds": 0.2, "idle_seconds": 0.5, "max_body": 1 << 16}
    offers: dict[str, Any] = {"embeddings": True, "pooling": "mean", "props": True, "metrics": True}
    with served(load, n_ctx_slot=128, context_shift=True, slot_save_path=folder, **limits, **offers) as (
        url,
        _,
    ):
        yield url


@pytest.mark.parametrize("seed", range(3))
def test_hostile_requests(target: str, seed: int) -> None:
    before = ask(target)
    codes = attack(target, seed, 100)
    assert codes[200] > 5 and codes[400] > 20
    assert ask(target) == before


@pytest.mark.slow
def test_ten_thousand_of_them(tmp_path: Path) -> None:
    """Four clients, beside one that is answered as ever; the memory is what it was, within N_MEGABYTES."""
    arguments = ("-c", "512", "--context-shift", "--slot-save-path", str(tmp_path), "--metrics", "--props")
    with served_alone(STORIES, *arguments, "--embeddings", "--pooling", "mean", "-to", "1") as (url, process):
        before = ask(url)
        attack(url, 99, 500)  # what is made once is there
        n_bytes = resident(process.pid)
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda seed=seed: found.append(attack(url, seed, N_SLOW // 4)))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        n_asked = 0
        while any(thread.is_alive() for thread in threads):
            assert ask(url) == before
            n_asked += 1
        assert len(found) == 4, "a thread has found something"
        assert n_asked > 10
        assert process.poll() is None
        grown = (resident(process.pid) - n_bytes) / 1e6
        print(f"{sum(found, Counter())}, {n_asked} beside them, grown by {grown:.1f} MB")
        assert sanitizer.ADDRESS or grown < N_MEGABYTES  # it keeps what is freed for a while


def resident(pid: int) -> int:
    """Bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


@pytest.mark.slow
def test_a_thousand_idle_connections() -> None:
    with served_alone(STORIES, "-c", "512") as (url, process):
        before = ask(url)
        n_bytes = resident(process.pid)
        idle = [socket.create_connection(where_of(url)) for _ in range(1000)]
        for client in idle[::2]:
            client.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\n")
        for _ in range(20):
            assert ask(url) == before
        grown = (resident(process.pid) - n_bytes) / 1e6
        print(f"1,000 idle connections: {grown:.1f} MB")
        assert grown < 64
        for client in idle:
            client.close()
        assert ask(url) == before


def test_wrong_keys_everywhere() -> None:
    wrong = [{}, {"X-Api-Key": "no"}, {"Authorization": "Bearer sesam2"}, {"Authorization": "sesam"}]
    wrong += [{"Authorization": "Bearer " + "s" * 4000}]
    with (
        served(load, api_keys=("sesam",), metrics=True, props=True, embeddings=True) as (url, _),
        httpx.Client(base_url=url) as client,
    ):
        asked = [("POST", path) for path in BODIES] + [("GET", path) for path in GETS]
        for (method, path), headers in itertools.product(asked, wrong):
            code = client.request(method, path, headers=headers, json=BODIES.get(path)).status_code
            is_open = path in PUBLIC and method == "GET"
            assert code == 200 if is_open else code == 401, (method, path, headers)
        for headers in ({"X-Api-Key": "sesam"}, {"Authorization": "Bearer sesam"}):
            assert client.get("/slots", headers=headers).status_code == 200


def test_a_slow_writer_and_a_slow_reader() -> None:
    """A body that comes byte by byte is answered; who doesn't read what is said is left behind."""
    with served(load, n_ctx_slot=512, context_shift=True, io_seconds=0.3) as (url, server):
        before = ask(url)
        body = b'{"prompt": "a", "n_predict": 2}'
        with socket.create_connection(where_of(url)) as writer:
            writer.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body))
            for i in range(len(body)):
                writer.sendall(body[i : i + 1])
                time.sleep(0.005)
            assert writer.recv(20).startswith(b"HTTP/1.1 200")
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(where_of(url))
            endless = {"prompt": "a", "stream": True, "ignore_eos": True, "n_probs": 20}
            data = json.dumps(endless).encode()
            reader.sendall(b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data))
            reader.sendall(data)
            assert reader.recv(20).startswith(b"HTTP/1.1 200")
            assert ask(url) == before
            deadline = time.monotonic() + 30
            while server.service.slots.n_processing and time.monotonic() < deadline:
                time.sleep(0.02)
            assert server.service.slots.n_processing == 0
        assert ask(url) == before


@pytest.mark.parametrize("n_signals", [1, 2])
def test_sigterm_drains_and_a_second_one_ends(n_signals: int) -> None:
    with served_alone(STORIES, "-c", "4096", "-np", "1", "--context-shift") as (url, process):
        n_predict = 1000 if n_signals == 1 else -1  # for ever
        fields = {**ASKED, "n_predict": n_predict, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completion", json=fields, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            while is_listening(url):
                next(lines)
            if n_signals == 1:
                last = [line for line in lines if line.startswith("data: ")][-1]
                assert json.loads(last[6:])["tokens_predicted"] == n_predict
            else:
                process.send_signal(signal.SIGTERM)
                with pytest.raises((httpx.TransportError, StopIteration)):
                    while True:
                        next(lines)
        assert process.wait(20) == 0


def is_listening(url: str) -> bool:
    try:
        socket.create_connection(where_of(url)).close()
    except OSError:
        return False
    return True

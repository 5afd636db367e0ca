"""Large bodies of clients that left keep nobody out, and what can't fit is refused before it is encoded."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect
from support.served import served, where_of

import pykvgraph as kvg
from pykvgraph._native.abandoned import work
from pykvgraph.server import app
from pykvgraph.server.slow_work import SlowWork

from .conftest import load

N_THREADS = min(32, (os.cpu_count() or 1) + 1)
LARGE, SMALL = 1 << 20, 1 << 10


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def leaves_at(gone: asyncio.Event) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


async def ends(running: list[asyncio.Future[None]]) -> list[BaseException | None]:
    return await asyncio.gather(*running, return_exceptions=True)


def until_unwanted() -> None:
    while True:
        work().require()
        time.sleep(0.005)


@pytest.fixture
def slow_work() -> Iterator[SlowWork]:
    slow = SlowWork()
    yield slow
    slow.close()


def test_who_leaves_makes_room(slow_work: SlowWork) -> None:
    """For three times as many as there are threads: what has begun ends, and what hasn't never does."""
    begun = []

    def endless() -> None:
        begun.append(1)
        until_unwanted()

    def run_until(gone: asyncio.Event) -> asyncio.Future[None]:
        return asyncio.ensure_future(slow_work.run(endless, SMALL, leaves_at(gone)))

    async def run() -> str:
        for_waiting, for_running = asyncio.Event(), asyncio.Event()
        running = [run_until(for_running) for _ in range(N_THREADS)]
        while len(begun) < N_THREADS:
            await asyncio.sleep(0.005)
        waiting = [run_until(for_waiting) for _ in range(2 * N_THREADS)]
        await asyncio.sleep(0.05)
        for_waiting.set()
        assert all(isinstance(each, ClientDisconnect) for each in await ends(waiting))
        for_running.set()
        assert all(isinstance(each, ClientDisconnect) for each in await ends(running))
        return await asyncio.wait_for(slow_work.run(lambda: "answer", SMALL, stays), 10)

    assert asyncio.run(run()) == "answer"
    assert len(begun) == N_THREADS


def test_very_large_bodies_leave_threads_to_others(slow_work: SlowWork) -> None:
    begun = []

    def endless() -> None:
        begun.append(1)
        until_unwanted()

    async def run() -> str:
        gone = asyncio.Event()
        large = [
            asyncio.ensure_future(slow_work.run(endless, LARGE, leaves_at(gone)))
            for _ in range(2 * N_THREADS)
        ]
        while not begun:
            await asyncio.sleep(0.005)
        answer = await asyncio.wait_for(slow_work.run(lambda: "answer", SMALL, stays), 10)
        gone.set()
        await asyncio.gather(*large, return_exceptions=True)
        return answer

    assert asyncio.run(run()) == "answer"
    assert len(begun) == 1


def test_what_was_made_meanwhile_is_handed_back(slow_work: SlowWork) -> None:
    """Such as a job, which must be cancelled: the client left while it was made."""
    has_begun, go_on = threading.Event(), threading.Event()

    def make() -> str:
        has_begun.set()
        go_on.wait(10)
        return "job"

    async def run() -> str:
        gone = asyncio.Event()
        running = asyncio.ensure_future(slow_work.run(make, SMALL, leaves_at(gone)))
        while not has_begun.is_set():
            await asyncio.sleep(0.005)
        gone.set()
        await asyncio.sleep(0.05)
        go_on.set()
        return await running

    assert asyncio.run(run()) == "job"


def test_its_errors_are_the_works_own(slow_work: SlowWork) -> None:
    def fail() -> None:
        raise kvg.InvalidArgumentError("no")

    with pytest.raises(kvg.InvalidArgumentError, match="no"):
        asyncio.run(slow_work.run(fail, SMALL, stays))


def test_bodies_of_clients_that_left_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> Any:
        until_unwanted()

    monkeypatch.setitem(app.WITH_BODY, "/tokenize", endless)
    with served(load) as (url, _):
        body = json.dumps({"content": "a" * app.LARGE}).encode()
        head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        clients = [socket.create_connection(where_of(url)) for _ in range(3 * N_THREADS)]
        for client in clients:
            client.sendall(head + body)
        time.sleep(0.2)
        for client in clients:
            client.close()
        fields = {"prompt": "Once", "n_predict": 1, "stop": ["-" * app.LARGE]}
        assert httpx.post(f"{url}/completion", json=fields, timeout=20).status_code == 200


def test_what_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    encode = kvg.Tokenizer.encode

    def seen(self: kvg.Tokenizer, text: str, *arguments: Any, **named: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, *arguments, **named)

    with served(load, embeddings=True, pooling="mean") as (url, server):
        service = server.service
        n_ctx, tokenizer = service.n_ctx, service.vocabulary.tokenizer
        longest = (
            max(len(tokenizer.token_to_piece(token)) for token in range(tokenizer.n_vocab)) + 2
        )  # U+2581
        text = "x" * ((n_ctx + 1) * longest)
        monkeypatch.setattr(kvg.Tokenizer, "encode", seen)
        messages = [{"role": "user", "content": text}]
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/completion", {"prompt": text}),
            ("/completion", {"prompt": ["Once", text]}),
            ("/completion", {"prompt": [1, text]}),
            ("/completion", {"prompt": [1, *["x" * n_ctx] * 100]}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 1}),
            ("/v1/embeddings", {"input": text}),
        ]
        for path, body in bodies:
            reply = httpx.post(f"{url}{path}", json=body, timeout=30)
            error = reply.json()["error"]
            error = error.get("error", error)
            assert reply.status_code == 400, path
            assert "at least" in error["message"], path
            if path != "/v1/messages":
                assert error["type"] == "exceed_context_size_error"
                assert error["n_ctx"] == n_ctx < error["n_prompt_tokens"]
        assert sum(encoded) < 3 * n_ctx
        # nor is one that may fit refused without a look
        reply = httpx.post(f"{url}/completion", json={"prompt": "x" * 2 * n_ctx}, timeout=30)
        count = len(encode(tokenizer, "x" * 2 * n_ctx, True, True))
        assert reply.json()["error"]["n_prompt_tokens"] == count
        reply = httpx.post(f"{url}/tokenize", json={"content": text}, timeout=30)
        assert len(reply.json()["tokens"]) >= tokenizer.least_tokens(text) > n_ctx


def test_a_body_that_is_refused_is_gone() -> None:
    """No circle of Python's holds its values: to find 100,000 of them, the collector would stop everybody."""
    bias = [[i, 1.5] for i in range(100_000)]
    with served(load) as (url, _):
        body = json.dumps({"prompt": "a", "n_predict": 1, "logit_bias": bias})
        for _ in range(2):  # the first one imports modules
            gc.collect()
            assert httpx.post(f"{url}/completion", content=body, timeout=60).status_code == 400
            n_found = gc.collect()
    assert n_found < 10_000


def test_no_very_large_body_is_read_while_something_is_done() -> None:
    """Which the collector asks for."""

    async def run() -> None:
        slow, may_end, done = SlowWork(), threading.Event(), list[str]()
        reading = asyncio.ensure_future(slow.run(lambda: may_end.wait(10), LARGE, stays))
        await asyncio.sleep(0.05)
        doing = asyncio.ensure_future(slow.between_very_large(lambda: done.append("done")))
        await asyncio.sleep(0.05)
        assert not done
        may_end.set()
        assert await reading
        await doing
        assert done
        slow.close()

    asyncio.run(run())

"""A request that hung or crashed its worker gets an error, and no other worker gets the request."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from support.fake_workers import starts

from pykvgraph.cluster import supervisor, worker_life
from pykvgraph.cluster.forward import MOST_DEATHS
from pykvgraph.cluster.pool import Pool
from pykvgraph.cluster.worker import HAS_READ, READS
from pykvgraph.cluster.worker_life import WorkerLife
from pykvgraph.cluster.workers import Workers
from pykvgraph.server.http.asker import NAME_HEADER
from pykvgraph.server.settings import Settings

from .test_front import LONG, Handler, ask, fine, reads
from .test_workers import SPEC, ready


class Dies:
    """A worker that ends while it has a request. fault: what it did. has_read: it had read the request."""

    def __init__(self, fault: str, *, has_read: bool) -> None:
        self.life = WorkerLife()
        self.n_asked = 0
        self._fault = fault
        self._has_read = has_read

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.n_asked += 1
        name = request.headers[NAME_HEADER]
        self.life.begins(name)
        if self._has_read:
            self.life.has_read(name)
        asyncio.get_running_loop().call_later(0.02, self.life.end, self._fault)  # the news come later
        raise httpx.ReadError("gone", request=request)


def pool_of(*handlers: Handler | Dies, n_prefill: int = 0) -> Pool:
    pool = Pool(Settings(n_slots=2), len(handlers), n_prefill=n_prefill)
    for number, handler in enumerate(handlers):
        client = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://worker")
        told = pool.up(number, client, 512)
        if isinstance(handler, Dies):
            handler.life = told
    return pool


def refusal_of(reply: httpx.Response) -> str:
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert error["type"] == "server_error" and "no other one gets it" in error["message"]
    return str(error["message"])


@pytest.mark.parametrize("fault", ["SIGSEGV", "it said nothing for 30 s"])
def test_who_was_read_when_the_worker_crashed_or_hung(fault: str) -> None:
    first, second = Dies(fault, has_read=False), Dies(fault, has_read=False)
    message = refusal_of(asyncio.run(ask(pool_of(first, second), prompt="a")))
    assert fault in message and "worker 0" in message
    assert (first.n_asked, second.n_asked) == (1, 0)


@pytest.mark.parametrize(("fault", "has_read"), [("SIGSEGV", True), ("", False), ("", True)])
def test_who_was_only_there_goes_on(fault: str, has_read: bool) -> None:
    """Its worker crashed by somebody else, or was killed by others."""
    reply = asyncio.run(ask(pool_of(Dies(fault, has_read=has_read), fine), prompt="a"))
    assert reply.status_code == 200


def test_who_has_seen_two_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that fills the memory does, or crashes the engine."""
    monkeypatch.setattr(worker_life, "_NOTICE", 0.1)
    workers = [Dies("", has_read=True) for _ in range(4)]
    assert f"{MOST_DEATHS} workers" in refusal_of(asyncio.run(ask(pool_of(*workers), prompt="a")))
    assert sum(each.n_asked for each in workers) == MOST_DEATHS == 2


def test_a_reader_that_crashes() -> None:
    """The one that was to answer doesn't get the prompt."""
    answers = Dies("", has_read=True)
    reply = asyncio.run(ask(pool_of(answers, Dies("SIGSEGV", has_read=False), n_prefill=1), prompt=LONG))
    assert "worker 1" in refusal_of(reply)
    assert answers.n_asked == 0


def test_a_reader_that_crashes_by_another_request() -> None:
    reader = Dies("SIGSEGV", has_read=True)
    assert asyncio.run(ask(pool_of(fine, reader, n_prefill=1), prompt=LONG)).status_code == 200


def test_a_reader_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(ask(pool_of(fine, reads, n_prefill=1), prompt=LONG)).status_code == 200


@pytest.mark.parametrize(("end", "fault"), [("os.abort()", "SIGABRT"), ("os.kill(os.getpid(), 9)", "")])
def test_what_a_process_says_until_its_end(monkeypatch: pytest.MonkeyPatch, end: str, fault: str) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.02)
    lines = ready(512) + READS + b"7\n" + READS + b"8\n" + HAS_READ + b"8\n"
    starts(monkeypatch, f"os.write(1, {lines!r}); {end}")
    lives: list[WorkerLife] = []

    class Noting(Pool):
        def up(self, *told: Any) -> WorkerLife:
            lives.append(super().up(*told))
            return lives[-1]

    async def main() -> None:
        workers = Workers(Noting(Settings(), 1), SPEC, 1)
        running = asyncio.ensure_future(workers.run())
        while workers.n_restarts < 1:
            await asyncio.sleep(0.01)
        workers.stop()
        await running
        assert await lives[0].ended_by("7") == fault
        assert await lives[0].ended_by("8") == ""

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_that_hangs_is_killed_and_its_request_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, and says nothing."""
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "HUNG_SECONDS", 0.3)
    code = (
        "import socket; listener = socket.socket(socket.AF_UNIX); listener.bind(path); listener.listen();"
        f"os.write(1, {ready(512)!r} + {READS + b'5' + bytes([10])!r}); time.sleep(60)"
    )
    starts(monkeypatch, code)
    pool = Pool(Settings(), 1)

    async def main() -> None:
        workers = Workers(pool, SPEC, 1)
        running = asyncio.ensure_future(workers.run())
        while not pool.clients:
            await asyncio.sleep(0.01)
        told = pool.life_of(pool.clients[0])
        assert re.fullmatch(r"it said nothing for 0\.3 s", await told.ended_by("5"))
        workers.stop()
        await asyncio.sleep(0.1)
        workers.stop()
        await running

    asyncio.run(asyncio.wait_for(main(), 30))

"""Processes that end as soon as they have begun, and the share of the machine that each gets."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from pathlib import Path

import pytest
from support.fake_workers import starts

from pykvgraph.cluster import supervisor
from pykvgraph.cluster.order import WorkerReady
from pykvgraph.cluster.pool import Pool
from pykvgraph.cluster.worker import READY
from pykvgraph.cluster.workers import Workers
from pykvgraph.errors import KVGraphError
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.settings import Settings

SPEC = EngineSpec("model.gguf", "", {}, {"n_ctx": "auto"}, {})


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(supervisor, "LONGEST_DELAY", 0.08)


def ready(n_ctx: int) -> bytes:
    """The line of a worker that can be asked."""
    return READY + json.dumps(WorkerReady(n_ctx, 512, "")._asdict()).encode() + b"\n"


def run_until(workers: Workers, n_restarts: int) -> None:
    """Lets them live until so many were started again, and ends them."""

    async def main() -> None:
        running = asyncio.ensure_future(workers.run())
        while workers.n_restarts < n_restarts:
            await asyncio.sleep(0.01)
        workers.stop()
        await running

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_that_dies_again_and_again_is_started_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, delays: None
) -> None:
    starts(monkeypatch, f"os.write(1, {ready(512)!r}); os.kill(os.getpid(), 9)")
    workers = Workers(Pool(Settings(), 1), SPEC, 1)

    with caplog.at_level(logging.WARNING, "pykvgraph.server"):
        run_until(workers, 5)
    found = re.findall(r"worker 0 ended \(SIGKILL\); it is started again in ([\d.]+) s", caplog.text)
    assert found[:5] == ["0.02", "0.04", "0.08", "0.08", "0.08"]


def test_none_that_starts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that would still load are ended."""
    starts(
        monkeypatch,
        "if not order['number']: sys.exit(3)\ntime.sleep(60)",
    )
    begin = time.monotonic()
    with pytest.raises(
        KVGraphError, match=r"worker 0 ended before it was ready \(exit code 3; it says why above\)"
    ):
        asyncio.run(Workers(Pool(Settings(), 2), SPEC, 2).run())
    assert time.monotonic() - begin < 30


def test_one_that_comes_again_has_as_many_cells(monkeypatch: pytest.MonkeyPatch, delays: None) -> None:
    """When it is started again, others have the memory that was free."""
    starts(
        monkeypatch,
        "n = order['engine']['context']['n_ctx'];"
        f"os.write(1, {ready(768)!r} if n == 'auto' else {ready(0)!r}.replace(b'0', b'%d' % (n + 1), 1));"
        "os.kill(os.getpid(), 9)",
    )
    workers = Workers(Pool(Settings(), 1), SPEC, 1)

    run_until(workers, 2)
    assert workers._n_ctx == {0: 768}


def test_one_that_hangs_is_killed_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    starts(
        monkeypatch,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"os.write(1, {ready(512)!r}); time.sleep(60)",
    )
    pool = Pool(Settings(), 1)
    workers = Workers(pool, SPEC, 1)

    async def main() -> None:
        running = asyncio.ensure_future(workers.run())
        while not pool.router.workers:
            await asyncio.sleep(0.01)
        workers.stop()
        await asyncio.sleep(0.3)
        assert not running.done()
        workers.stop()
        await running

    asyncio.run(asyncio.wait_for(main(), 20))
    assert not workers._processes and workers.n_restarts == 0


def test_one_that_says_nothing_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, delays: None
) -> None:
    """It listens, and never answers; one that answers is left alone, and so is one that nobody can reach."""
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "HUNG_SECONDS", 1.0)  # a machine may be busy
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    starts(
        monkeypatch,
        "import socket\n"
        "if order['number'] < 2:\n"
        "    listener = socket.socket(socket.AF_UNIX); listener.bind(path); listener.listen()\n"
        f"os.write(1, {ready(512)!r})\n"
        "while order['number'] == 1:\n"
        f"    heard, _ = listener.accept(); heard.recv(9999); heard.sendall({answer!r}); heard.close()\n"
        "time.sleep(60)",
    )
    workers = Workers(Pool(Settings(), 3), SPEC, 3)

    with caplog.at_level(logging.WARNING, "pykvgraph.server"):
        run_until(workers, 2)
    told = re.findall(r"worker (\d) has said nothing", caplog.text)
    assert len(told) >= 2 and set(told) == {"0"}
    assert set(re.findall(r"worker (\d) ended", caplog.text)) == {"0"}


def test_the_share_of_one_of_four(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    tiers = {"ram": 1000, "disk": 5000, "path": tmp_path}
    share = EngineSpec("model.gguf", "", {}, {"n_ctx": "auto"}, tiers).share_of(4)
    assert share.context["memory_share"] == 0.25
    assert share.tiers == {"ram": 250, "disk": 5000, "path": tmp_path}
    assert share.most_threads == 1

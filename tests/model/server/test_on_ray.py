"""`pykvgraph serve --cluster`: workers that are actors of Ray, of which some are killed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.served import events, said_by, served_alone

from .conftest import STORIES
from .test_workers import is_alive, until, values_of

pytest.importorskip("ray", reason="ray is not installed: pip install 'pykvgraph[cluster]'")
pytestmark = pytest.mark.slow

N_WORKERS, N_REQUESTS, N_KILLS, N_CLIENTS = 4, 200, 5, 16
OPTIONS = ("-c", "2048", "-np", "4", "-t", "1", "--workers", str(N_WORKERS), "--cluster")
NAMES = ("Tom", "Lily", "Ben", "Mia", "Sue")
BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"{NAMES[i % 5]} had {i} big dogs and",
        "n_predict": 40,
        "temperature": 0,
        "stream": i % 2 == 0,
        "ignore_eos": True,
    }
    for i in range(N_REQUESTS)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster of one machine, which says that it has as many CPUs as there are workers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--num-cpus={N_WORKERS}", f"--port={port}", "--include-dashboard=false"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert any("Ray runtime started" in line for line in process.stdout)
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait(60)


def pids(process: subprocess.Popen[str]) -> dict[int, int]:
    """Of each worker the process that is its newest, as the server has told it."""
    found = re.findall(r"worker (\d+) is ready \(process (\d+)", said_by(process))
    return {int(number): int(pid) for number, pid in found}


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    reply = await client.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        return str(reply.json()["content"])
    found = events(reply.text)
    assert [event["stop"] for event in found] == [False] * (len(found) - 1) + [True], reply.text[-500:]
    assert found[-1]["tokens_predicted"] == body["n_predict"]
    return "".join(event["content"] for event in found)


async def ask_all(url: str, n_kills: int = 0, process: subprocess.Popen[str] | None = None) -> list[str]:
    """N_CLIENTS at a time; meanwhile a worker is killed, again and again, as long as another one is up."""
    answers: dict[int, str] = {}
    left = list(range(N_REQUESTS))[::-1]
    rng = random.Random(1)
    killed: set[int] = set()

    async def one_after_the_other(client: httpx.AsyncClient) -> None:
        while left:
            i = left.pop()
            answers[i] = await ask(client, BODIES[i])

    async def kill() -> None:
        assert process is not None
        while len(killed) < n_kills:
            await asyncio.sleep(0.05)
            alive = [pid for pid in pids(process).values() if is_alive(pid)]
            assert left, f"only {len(killed)} were killed"
            if len(answers) >= (len(killed) + 1) * N_REQUESTS // (n_kills + 2) and len(alive) > 1:
                killed.add(chosen := rng.choice(alive))
                os.kill(chosen, signal.SIGKILL)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        clients = [one_after_the_other(client) for _ in range(N_CLIENTS)]
        await asyncio.gather(*clients, *([kill()] if n_kills else []))
    assert len(killed) == n_kills
    return [answers[i] for i in range(N_REQUESTS)]


def test_five_kills_lose_nothing(cluster: str, address: str) -> None:
    """200 requests at four workers: each is answered once, with the tokens of one server without workers."""
    expected = asyncio.run(ask_all(address))
    with served_alone(STORIES, *OPTIONS, cluster) as (url, process):
        assert sorted(pids(process)) == list(range(N_WORKERS))
        before = pids(process)
        assert asyncio.run(ask_all(url, N_KILLS, process)) == expected
        until(lambda: len(httpx.get(f"{url}/slots", timeout=30).json()) == 4 * N_WORKERS, 60)
        assert before != pids(process) and all(map(is_alive, pids(process).values()))
        drains(url, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        until(lambda: not any(map(is_alive, pids(process).values())))


def drains(url: str, process: subprocess.Popen[str]) -> None:
    """SIGTERM to a worker: what it answers ends as ever, and another one takes its place."""
    old = pids(process)[1]
    body = {**BODIES[0], "n_predict": 400, "id_slot": 4}
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=60) as reply:
        parts = reply.iter_text()
        text = next(parts)
        os.kill(old, signal.SIGTERM)
        until(lambda: "worker 1 drains" in said_by(process))
        text += "".join(parts)
    last = events(text)[-1]
    assert last["stop"] and last["tokens_predicted"] == 400 and last["id_slot"] == 4
    until(lambda: pids(process)[1] != old, 60)
    until(lambda: not is_alive(old))


def test_too_many_workers_for_the_cluster(cluster: str, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="40 workers need 1 CPUs each"),
        served_alone(STORIES, "-c", "512", "--workers", "40", "--cluster", cluster),
    ):
        pass
    path = tmp_path / "no.gguf"
    path.write_bytes(b"no model")
    with (
        pytest.raises(AssertionError, match="ended before it was ready"),
        served_alone(path, *OPTIONS, cluster),
    ):
        pass


def test_roles(cluster: str) -> None:
    """A prompt is read by the last worker, and answered by one that decodes hardly any of it."""
    options = ("-c", "2048", "-np", "2", "-t", "1", "--workers", "3", "--metrics")
    body = {"prompt": "Once there was a frog in a big pond. " * 30, "n_predict": 8, "temperature": 0}
    roles = ("--prefill-workers", "1", "--replicate")
    with served_alone(STORIES, *options, *roles, "--cluster", cluster) as (url, _):
        answer = httpx.post(f"{url}/completion", json=body, timeout=60).json()
        assert answer["timings"]["prompt_n"] < 64, answer["timings"]
        assert values_of(url, "prompt_tokens_total")[2] > 250

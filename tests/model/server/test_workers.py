"""`pykvgraph serve --workers 2`: real processes, of which some are killed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from support.served import events, said_by, served_alone, where_of

from pykvgraph.server.http.keys import RUN_HEADER

from .conftest import STORIES

OPTIONS = ("-c", "2048", "-np", "4", "--workers", "2", "--metrics", "--context-shift")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def sockets_of(pid: int) -> str:
    """Of the workers of a server."""
    links = [link for child in children_of(pid) for link in Path(f"/proc/{child}/fd").iterdir()]
    return " ".join(os.readlink(link) for link in links)


def worker_of(process: subprocess.Popen[str], number: int) -> int:
    """The process of a worker, as the server told it last."""
    return int(re.findall(rf"worker {number} is ready \(process (\d+)\)", said_by(process))[-1])


Served = tuple[str, "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def workers() -> Iterator[Served]:
    with served_alone(STORIES, *OPTIONS) as found:
        yield found


def values_of(url: str, name: str) -> dict[int, float]:
    """A metric of each worker."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(rf'^kvgraph:{name}{{worker="(\d+)"}} (\S+)$', text, re.MULTILINE)
    return {int(worker): float(value) for worker, value in found}


def said(reply: httpx.Response) -> Any:
    """What an answer says, without what differs from one to the next."""
    value = reply.json()
    varying = (
        "id",
        "created",
        "timings",
        "id_slot",
        "generation_settings",
        "usage",
        "system_fingerprint",
        "model",
    )
    return {name: each for name, each in value.items() if name not in varying}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "Once upon a time", "n_predict": 12, **GREEDY}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 8, **GREEDY}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **GREEDY},
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0},
        ),
        ("/tokenize", {"content": "Once upon a time"}),
        ("/tokenize", {"prompt": "Once upon a time"}),
        ("/completion", {"prompt": 5.5}),
        ("/v1/messages", {}),
        ("/v1/embeddings", {"input": "a"}),
        ("/completion", {"prompt": "a", "id_slot": 2**40}),
    ],
)
def test_answers_are_those_of_one_server(
    address: str, workers: Served, path: str, body: dict[str, Any]
) -> None:
    one, several = (httpx.post(f"{url}{path}", json=body, timeout=30) for url in (address, workers[0]))
    assert one.status_code == several.status_code
    assert one.headers["content-type"] == several.headers["content-type"]
    assert said(one) == said(several)


def test_streams_are_those_of_one_server(address: str, workers: Served) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 20, "stream": True, **GREEDY}
    one, several = (httpx.post(f"{url}/completion", json=body, timeout=30) for url in (address, workers[0]))
    assert several.headers["content-type"] == "text/event-stream"
    assert events(one.text)[:-1] == events(several.text)[:-1]


def test_the_second_turn_goes_where_the_first_was(workers: Served) -> None:
    url, _ = workers
    for i in range(4):
        talk: list[dict[str, str]] = [{"role": "user", "content": f"{i} talks of cats and dogs. " * 4}]
        before = values_of(url, "prompt_tokens_total")
        reply = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": talk, "max_tokens": 4, **GREEDY}, timeout=30
        )
        first = {n for n, value in values_of(url, "prompt_tokens_total").items() if value > before.get(n, 0)}
        talk += [reply.json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
        before = values_of(url, "prompt_tokens_total")
        reply = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": talk, "max_tokens": 4, **GREEDY}, timeout=30
        )
        second = {n for n, value in values_of(url, "prompt_tokens_total").items() if value > before.get(n, 0)}
        assert first == second and len(first) == 1
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 20


def test_what_is_told_of_all(workers: Served) -> None:
    url, _ = workers
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    found = httpx.get(f"{url}/v1/models/{quote(model['id'], safe='')}").json()
    assert found | {"created": 0} == model | {"created": 0}
    missing = httpx.get(f"{url}/v1/models/a%3Fb%20c").json()["error"]
    assert missing["message"] == "The model 'a?b c' does not exist"
    assert httpx.get(f"{url}/tokenizer_info").json()["eos_token"] == "</s>"
    assert httpx.get(f"{url}/props").json()["total_slots"] == 8
    slots = httpx.get(f"{url}/slots").json()
    assert [(slot["id"], slot["worker"]) for slot in slots] == [(i, i // 4) for i in range(8)]
    assert set(values_of(url, "n_decode_total")) == {0, 1}
    for worker in (0, 1):
        assert httpx.get(f"{url}/cells?worker={worker}").json()["groups"]
    assert [httpx.get(f"{url}/cells?worker={w}").status_code for w in ("x", "2", "-1")] == [400] * 3
    assert "text/html" in httpx.get(f"{url}/").headers["content-type"]
    assert httpx.get(f"{url}/nowhere").json()["error"]["code"] == 404


def test_a_request_gets_the_slot_that_it_wants(workers: Served) -> None:
    url, _ = workers
    for slot in (1, 6):
        body = {"prompt": "Once", "n_predict": 2, "id_slot": slot, **GREEDY}
        assert httpx.post(f"{url}/completion", json=body, timeout=30).json()["id_slot"] == slot


def test_keys_are_asked_for(tmp_path: Path) -> None:
    with served_alone(STORIES, *OPTIONS, "--api-key", "A,B") as (url, _):
        body = {"prompt": "Once", "n_predict": 2}
        assert httpx.post(f"{url}/completion", json=body, timeout=30).status_code == 401
        for key in ("A", "B"):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.post(f"{url}/completion", json=body, headers=headers, timeout=30).status_code == 200
        assert len(httpx.get(f"{url}/slots", headers={"X-Api-Key": "A"}, timeout=30).json()) == 8


def test_a_worker_answers_nobody_without_the_token(workers: Served) -> None:
    """Its socket is in a folder of this user alone, and wants the token of the run even so."""
    _, process = workers
    listening = {int(inode) for inode in re.findall(r"socket:\[(\d+)\]", sockets_of(process.pid))}
    paths = [
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]
        if int(line.split()[6]) in listening and line.split()[-1].startswith("/")
    ]
    assert len(set(paths)) == 2
    for path in set(paths):
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=path), base_url="http://worker", timeout=30
        ) as client:
            for headers in ({}, {RUN_HEADER: "0" * 64}, {RUN_HEADER: ""}):
                for method, where in (("GET", "/health"), ("GET", "/"), ("POST", "/completion")):
                    assert client.request(method, where, headers=headers).status_code == 401


def test_a_client_that_goes_away_ends_its_request(workers: Served) -> None:
    url, _ = workers
    endless = {"prompt": "Once", "n_predict": -1, "stream": True, **GREEDY}
    slots = f"{url}/slots"
    with httpx.stream("POST", f"{url}/completion", json=endless, timeout=30) as reply:
        next(reply.iter_raw())
    until(lambda: not any(slot["is_processing"] for slot in httpx.get(slots).json()))


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_closes_its_side_gets_the_answer(workers: Served, streams: bool) -> None:
    body = json.dumps({"prompt": "Once", "n_predict": 100, "stream": streams, **GREEDY}).encode()
    with socket.create_connection(where_of(workers[0]), 30) as client:
        head = b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        client.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert b'"tokens_predicted":100' in data


# Greedy as a stream and whole, with a seed, and without one. Only greedy ones are compared: where tokens are
# drawn, the last bit of a logit may decide, and that depends on which texts a step decodes together.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "stream": True},
    {"temperature": 0, "stream": False},
    {"temperature": 1.0, "stream": False, "seed": 7},
    {"temperature": 1.0, "stream": False},
)
BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"{name} went to the park with a big dog and",
        "n_predict": 150,
        "ignore_eos": True,
        **KINDS[i % 4],
    }
    for i, name in enumerate(("Tom", "Lily", "Ben", "Mia", "Sue") * 4)
]
ALIKE = [i for i, body in enumerate(BODIES) if not body["temperature"]]


async def ask_all(url: str, n_bodies: int, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
    """What each is told, asked at a time. meanwhile: is called when ten events have come."""
    n_events = 0

    async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        nonlocal n_events
        if not body["stream"]:
            reply = await client.post("/completion", json=body)
            assert reply.status_code == 200, reply.text
            return str(reply.json()["content"])
        text = ""
        async with client.stream("POST", "/completion", json=body) as reply:
            async for part in reply.aiter_text():
                text += part
                n_events += 1
                if n_events == 10:
                    meanwhile()
        found = events(text)
        assert [event["stop"] for event in found] == [False] * (len(found) - 1) + [True], text[-500:]
        assert found[-1]["tokens_predicted"] == body["n_predict"]
        return "".join(event["content"] for event in found)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(ask(client, body) for body in BODIES[:n_bodies]))


def test_kill_9_of_a_worker_loses_nothing() -> None:
    """20 requests: each is answered, and what is greedy says what it says in another run."""
    with served_alone(STORIES, *OPTIONS) as (url, process):
        undisturbed = asyncio.run(ask_all(url, 20))
        before = children_of(process.pid)
        assert len(before) == 2

        def kill() -> None:
            # of the second worker; on a busy machine not all requests have come by now
            assert any(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json()[4:])
            os.kill(before[1], signal.SIGKILL)

        disturbed = asyncio.run(ask_all(url, 20, kill))
        assert [disturbed[i] for i in ALIKE] == [undisturbed[i] for i in ALIKE]
        assert all(disturbed)
        until(lambda: len(children_of(process.pid)) == 2 and len(httpx.get(f"{url}/slots").json()) == 8)
        assert len(set(before) & set(children_of(process.pid))) == 1


def test_sigterm_ends_all_processes_and_lets_requests_finish() -> None:
    with served_alone(STORIES, *OPTIONS) as (url, process):
        children = children_of(process.pid)

        def end() -> None:
            process.send_signal(signal.SIGTERM)

        answers = asyncio.run(ask_all(url, 4, end))
        assert len(answers) == 4
        assert process.wait(30) == 0
        assert not any(map(is_alive, children))


def test_sigterm_to_a_worker_drains_it() -> None:
    """What it answers ends as ever, who comes meanwhile goes elsewhere, a new one takes its place."""
    with served_alone(STORIES, *OPTIONS) as (url, process):
        old = worker_of(process, 1)
        body = {"prompt": "Once", "stream": True, "n_predict": 2500, "id_slot": 4, **GREEDY}
        with httpx.stream("POST", f"{url}/completion", json=body, timeout=60) as reply:
            parts = reply.iter_text()
            text = next(parts)
            os.kill(old, signal.SIGTERM)
            until(lambda: "drains" in said_by(process))
            for _ in range(6):
                asked = {"prompt": "Once", "n_predict": 2, **GREEDY}
                slot = httpx.post(f"{url}/completion", json=asked, timeout=30).json()["id_slot"]
                assert slot < 4
            assert is_alive(old)
            text += "".join(parts)
        last = events(text)[-1]
        assert last["stop"] and last["tokens_predicted"] == 2500 and last["id_slot"] == 4
        until(lambda: not is_alive(old) and len(httpx.get(f"{url}/slots").json()) == 8)
        assert httpx.post(f"{url}/completion", json={**asked, "id_slot": 5}, timeout=30).status_code == 200


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_request_that_ends_its_worker_while_it_is_read() -> None:
    """When the worker crashes the request gets an error, and no other worker; others go on, as after kill -9.

    The body takes seconds to read; when the worker is killed by others meanwhile, it is read once more.
    """
    body = {"content": "Once upon a time there was a little girl. " * 40_000}
    with served_alone(STORIES, *OPTIONS) as (url, process), httpx.Client(base_url=url, timeout=120) as client:
        asked = {"prompt": "Once", "n_predict": 2, **GREEDY}
        workers = [worker_of(process, number) for number in range(2)]

        def kill_the_one_that_reads(number: signal.Signals) -> httpx.Response:
            before = {pid: cpu_seconds(pid) for pid in workers}
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                reply = pool.submit(client.post, "/tokenize", json=body)
                busy: list[int] = []
                while not busy:
                    busy = [pid for pid in workers if cpu_seconds(pid) - before[pid] > 0.2]
                os.kill(busy[0], number)
                return reply.result()

        refused = kill_the_one_that_reads(signal.SIGABRT)
        assert refused.status_code == 500
        assert "SIGABRT" in refused.text and "while it read this request" in refused.text
        until(lambda: len(client.get("/slots").json()) == 8)
        assert len(re.findall(r"worker \d ended", said_by(process))) == 1
        assert client.post("/completion", json=asked).status_code == 200
        workers = [worker_of(process, number) for number in range(2)]
        assert kill_the_one_that_reads(signal.SIGKILL).status_code == 200
        until(lambda: len(client.get("/slots").json()) == 8)


def test_kill_9_of_the_parent_leaves_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, and no socket."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served_alone(STORIES, *OPTIONS) as (_, process):
        children = children_of(process.pid)
        assert len(children) == 2 and all(map(is_alive, children))
        assert len(list(tmp_path.rglob("?.0"))) == 2
        process.kill()
        try:
            until(lambda: not any(map(is_alive, children)), 10)
            assert not list(tmp_path.iterdir())
        finally:
            for child in filter(is_alive, children):
                os.kill(child, signal.SIGKILL)


def test_a_model_that_is_none_ends_the_server(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"no model")
    with pytest.raises(AssertionError, match="ended before it was ready"), served_alone(path, *OPTIONS):
        pass

"""What becomes of requests when workers fail, and of what hostile clients send. The workers are functions."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from support import chance
from support.hostile_requests import request_of, send
from support.served import where_of

from pykvgraph.cluster import forward, replay
from pykvgraph.cluster import pool as pool_of_workers
from pykvgraph.cluster.asked import asked_of
from pykvgraph.cluster.forward import MOST_REPEATS
from pykvgraph.cluster.front import front_app
from pykvgraph.cluster.pool import Pool
from pykvgraph.server.run import HttpServer, address_of, listen
from pykvgraph.server.settings import Settings

Handler = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]
STREAM = {"content-type": "text/event-stream"}


async def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("gone", request=request)


async def fine(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"path": request.url.raw_path.decode(), "body": request.content.decode()})


def pool_of(*handlers: Handler, **settings: Any) -> Pool:
    pool = Pool(Settings(**{"n_slots": 2, **settings}), len(handlers))
    for number, handler in enumerate(handlers):
        come(pool, number, handler)
    return pool


def come(pool: Pool, number: int, handler: Handler) -> None:
    pool.up(number, httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://worker"), 512)


def client_of(pool: Pool) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(front_app(pool)), base_url="http://pool")


async def ask(pool: Pool, **fields: Any) -> httpx.Response:
    async with client_of(pool) as client:
        return await client.post("/completion", json=fields)


def test_who_asks_while_all_are_gone_waits_until_one_is_back() -> None:
    """Both have ended, and nobody has seen it yet."""

    async def main() -> None:
        pool = pool_of(gone, gone)
        asking = asyncio.ensure_future(ask(pool, prompt="a"))
        await asyncio.sleep(0.05)
        assert not asking.done()
        pool.down(0)
        pool.down(1)
        await asyncio.sleep(0.05)
        assert not asking.done()
        come(pool, 1, fine)
        assert (await asking).status_code == 200

    asyncio.run(main())


def test_a_slot_of_a_worker_that_has_ended_is_waited_for() -> None:
    async def main() -> None:
        pool = pool_of(fine, gone)
        asking = asyncio.ensure_future(ask(pool, prompt="a", id_slot=3))
        await asyncio.sleep(0.05)
        pool.down(1)
        come(pool, 1, fine)
        reply = await asking
        assert json.loads(reply.json()["body"])["id_slot"] == 3

    asyncio.run(main())


def test_a_request_that_ends_its_workers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_of_workers, "_NOTICE", 0.01)
    n_asked = 0

    async def poisoned(request: httpx.Request) -> httpx.Response:
        nonlocal n_asked
        n_asked += 1
        return await gone(request)

    reply = asyncio.run(ask(pool_of(poisoned, poisoned), prompt="a"))
    assert reply.status_code == 500 and f"tried {1 + MOST_REPEATS} times" in reply.json()["error"]["message"]
    assert n_asked == 1 + MOST_REPEATS


def test_nobody_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_of_workers, "_PATIENCE", 0.05)

    async def main() -> httpx.Response:
        pool = pool_of(fine)
        pool.down(0)
        return await ask(pool, prompt="a")

    reply = asyncio.run(main())
    assert reply.status_code == 503 and "ask again later" in reply.json()["error"]["message"]


def test_who_drains_gets_nothing_new() -> None:
    n_asked = [0, 0]

    def counted(number: int) -> Handler:
        async def handler(request: httpx.Request) -> httpx.Response:
            n_asked[number] += 1
            return await fine(request)

        return handler

    async def main() -> None:
        pool = pool_of(counted(0), counted(1))
        pool.drains(0)
        for _ in range(5):
            assert (await ask(pool, prompt="a" * 300)).status_code == 200

    asyncio.run(main())
    assert n_asked == [0, 5]


def event_of(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({"index": 0, "content": text}).encode()


def streaming(parts: list[bytes], *, breaks: bool = False) -> Handler:
    async def said() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if breaks:
            raise httpx.ReadError("gone")

    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=STREAM, content=said())

    return handler


STOPS = b'data: {"error":{"code":503,"message":"the server stops","type":"unavailable_error"}}\n\n'
TEXT = [event_of(word) for word in ("Once", " upon", " a", " time")]


@pytest.mark.parametrize("first", [TEXT[:2], [TEXT[0], TEXT[1][:9]], [*TEXT[:2], STOPS], []])
def test_a_stream_goes_on_at_another_worker(first: list[bytes]) -> None:
    """Cut off, cut off within an event, ended by a worker that stops, cut off before it began."""
    pool = pool_of(streaming(first, breaks=STOPS not in first), streaming(TEXT))
    assert asyncio.run(ask(pool, prompt="a", stream=True)).content == b"".join(TEXT)


@pytest.mark.parametrize("n_others", [MOST_REPEATS - 1, MOST_REPEATS])
def test_a_worker_that_says_something_else_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, n_others: int
) -> None:
    monkeypatch.setattr(pool_of_workers, "_NOTICE", 0.01)
    lives = iter([streaming(TEXT[:2], breaks=True), *[streaming([event_of("One")])] * n_others])

    async def next_life(request: httpx.Request) -> httpx.Response:
        return await next(lives, streaming(TEXT))(request)

    said = asyncio.run(ask(pool_of(next_life), prompt="a", stream=True)).content
    if n_others < MOST_REPEATS:
        assert said == b"".join(TEXT)
    else:
        assert said.startswith(b"".join(TEXT[:2]) + b'data: {"error"') and b"something else" in said


def test_a_stream_that_is_too_long_to_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of it is bounded; until it is cut off it goes on."""
    monkeypatch.setattr(replay, "MOST_SENT", 3 * len(TEXT[0]))
    assert asyncio.run(ask(pool_of(streaming(TEXT)), stream=True)).content == b"".join(TEXT)
    cut = asyncio.run(ask(pool_of(streaming(TEXT, breaks=True), streaming(TEXT)), stream=True)).content
    assert cut.startswith(b"".join(TEXT) + b'data: {"error"') and b"too long" in cut


def test_a_reader_that_takes_nothing_is_left_behind() -> None:
    """Its worker is free again."""

    async def main() -> None:
        pool = pool_of(streaming(TEXT), io_seconds=0.05)
        asked = [{"type": "http.request", "body": b'{"stream": true}', "more_body": False}]

        async def receive() -> Any:
            return asked.pop() if asked else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/completion",
            "query_string": b"",
            "headers": [],
        }
        await asyncio.wait_for(front_app(pool)(scope, receive, send), 5)
        assert pool.router.n_requests(0) == 0

    asyncio.run(main())


@pytest.mark.parametrize("host", ["a/slots/0?action=erase&", "a:b", "[", "a/\u00e9", ""])
def test_the_header_host_changes_no_path(host: str) -> None:
    async def main() -> httpx.Response:
        async with client_of(pool_of(fine)) as client:
            return await client.post(
                "/completion", content=b'{"seed": 1}', headers=[(b"host", host.encode())]
            )

    assert asyncio.run(main()).json() == {"path": "/completion", "body": '{"seed": 1}'}


def test_a_long_body_is_refused_everywhere() -> None:
    async def main() -> None:
        async with client_of(pool_of(fine, max_body=100)) as client:
            for path in ("/completion", "/props", "/slots/0?action=save"):
                assert (await client.post(path, content=b"a" * 101)).status_code == 413
            assert (await client.request("GET", "/v1/models", content=b"a" * 300)).json()["body"] == ""

    asyncio.run(main())


async def told(request: httpx.Request) -> httpx.Response:
    """What a worker says at each path, about."""
    if request.url.path == "/slots":
        return httpx.Response(200, json=[{"id": 0, "is_processing": False}])
    if request.url.path == "/metrics":
        return httpx.Response(200, text="# TYPE a counter\na_total 1\n")
    try:
        json.loads(request.content or b"{}")
    except ValueError:
        return httpx.Response(400, json={"error": {"message": "no JSON"}})
    return httpx.Response(200, json={})


def test_damaged_requests() -> None:
    """Whatever comes, a client hears what it may hear, and no request is left behind."""
    pool = pool_of(told, told, body_seconds=0.2, idle_seconds=0.5, max_body=1 << 16)
    server = HttpServer(pool.settings, front_app(pool))
    rng, codes = random.Random(chance.seed(3)), Counter[int]()
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            for _ in range(400):
                data = request_of(rng)
                answer = send(where_of(address_of(listener)), data)
                assert answer.is_right, (data, answer)
                codes[answer.code] += 1
        finally:
            server.stop()
            thread.join(30)
    assert codes[200] > 100 and codes[400] > 10 and codes[404] > 0
    assert pool.router.n_requests(0) == pool.router.n_requests(1) == 0


def test_json_as_deep_as_it_may_be() -> None:
    """Whoever reads it in the end says whether it is too deep."""
    for depth in range(900, 1000, 7):
        body = b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"

        async def main(body: bytes = body) -> int:
            async with client_of(pool_of(fine)) as client:
                return (await client.post("/completion", content=body)).status_code

        assert asyncio.run(main()) == 200


async def reads(request: httpx.Request) -> httpx.Response:
    assert "x-kvgraph-reads" in request.headers
    return httpx.Response(200, json={})


LONG = "a prompt of which nobody has anything " * 40


def pool_with_reader(*handlers: Handler) -> Pool:
    """The last of the workers only reads."""
    pool = Pool(Settings(n_slots=2), len(handlers), n_prefill=1)
    for number, handler in enumerate(handlers):
        come(pool, number, handler)
    return pool


def test_a_long_prompt_is_read_first_by_another_worker() -> None:
    asked: list[tuple[int, str, bool]] = []

    def worker(number: int) -> Handler:
        async def answer(request: httpx.Request) -> httpx.Response:
            asked.append(
                (number, json.loads(request.content)["prompt"][:3], "x-kvgraph-reads" in request.headers)
            )
            return httpx.Response(200, json={})

        return answer

    pool = pool_with_reader(worker(0), worker(1))
    for prompt in ("new" + LONG, "new" + LONG, "abc"):
        asyncio.run(ask(pool, prompt=prompt))
    # the second time nothing of it is new
    assert asked == [(1, "new", True), (0, "new", False), (0, "new", False), (0, "abc", False)]


def test_who_reads_may_be_gone_or_say_anything() -> None:
    async def odd(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, content=b"no JSON")

    for reader in (gone, odd):
        assert asyncio.run(ask(pool_with_reader(fine, reader), prompt=LONG)).status_code == 200


def test_who_reads_may_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts are read elsewhere; it gets no more of them than it has slots, until it is back."""
    monkeypatch.setattr(forward, "_LOOK", 0.01)
    n_asked = 0

    async def main() -> None:
        nonlocal n_asked
        goes_on = asyncio.Event()

        async def stopped(request: httpx.Request) -> httpx.Response:
            nonlocal n_asked
            n_asked += request.url.path == "/completion"
            if request.url.path == "/health":
                raise httpx.ReadTimeout("stopped")
            await goes_on.wait()
            return httpx.Response(200, json={})

        pool = pool_with_reader(fine, stopped)
        for i in range(4):
            reply = await asyncio.wait_for(ask(pool, prompt=f"{i}{LONG}"), 5)
            assert reply.status_code == 200
        assert (n_asked, pool.prefill.n_requests(1)) == (2, 2)
        goes_on.set()
        await asyncio.sleep(0.05)
        assert pool.prefill.n_requests(1) == 0

    asyncio.run(main())


def test_who_reads_may_take_long_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_LOOK", 0.01)
    n_ended = 0

    async def slow(request: httpx.Request) -> httpx.Response:
        nonlocal n_ended
        if request.url.path == "/completion":
            await asyncio.sleep(0.1)
            n_ended += 1
        return httpx.Response(200, json={})

    async def answers(request: httpx.Request) -> httpx.Response:
        assert n_ended == 1
        return httpx.Response(200, json={})

    assert asyncio.run(ask(pool_with_reader(answers, slow), prompt=LONG)).status_code == 200


def test_a_client_that_goes_away_ends_the_reading() -> None:
    async def main() -> None:
        async def stopped(request: httpx.Request) -> httpx.Response:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        pool = pool_with_reader(fine, stopped)
        asking = asyncio.ensure_future(ask(pool, prompt=LONG))
        await asyncio.sleep(0.05)
        assert pool.prefill.n_requests(1) == 1
        asking.cancel()
        await asyncio.sleep(0.05)
        assert pool.prefill.n_requests(1) == 0

    asyncio.run(main())


def test_a_worker_may_end_while_its_prompt_is_read() -> None:
    """Another one answers then."""

    async def main() -> None:
        async def reads_long(request: httpx.Request) -> httpx.Response:
            if len(pool.router.workers) == 2:
                client = pool.clients[0]
                pool.down(0)
                await client.aclose()
            return httpx.Response(200, json={})

        pool = pool_with_reader(fine, fine, reads_long)
        assert (await ask(pool, prompt=LONG)).status_code == 200
        assert len(pool.router.workers) == 1

    asyncio.run(main())


def test_tokens_that_are_told_go_on_to_the_next_worker_alone() -> None:
    """The first one dies behind two tokens; the client sees no comment, and no text twice."""
    bodies: list[dict[str, Any]] = []

    def stream(tokens: list[int], *, ends: bool) -> Handler:
        async def parts() -> AsyncIterator[bytes]:
            for token in tokens:
                yield b':said %d\n\ndata: {"content": "%d"}\n\n' % (token, token)
            if not ends:
                raise httpx.ReadError("gone")

        async def answer(request: httpx.Request) -> httpx.Response:
            assert "x-kvgraph-tells" in request.headers
            bodies.append(json.loads(request.content))
            return httpx.Response(200, headers=STREAM, content=parts())

        return answer

    reply = asyncio.run(
        ask(pool_of(stream([7, 8], ends=False), stream([7, 8, 9], ends=True)), prompt="a", stream=True)
    )
    assert reply.text == "".join(f'data: {{"content": "{token}"}}\n\n' for token in (7, 8, 9))
    assert [body.get("x_kvgraph_said") for body in bodies] == [None, [7, 8]]


def test_copies_go_to_a_second_worker() -> None:
    to: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        to.append(request.headers.get("x-kvgraph-copy-to", ""))
        return httpx.Response(200, json={})

    pool = Pool(Settings(n_slots=2), 2, replicates=True)
    for number in (0, 1):
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://worker")
        pool.up(number, client, 512, f"unix:/{number}")
    asyncio.run(ask(pool, prompt=LONG))
    asyncio.run(ask(pool, prompt=LONG, cache_prompt=False))
    object.__setattr__(pool.settings, "cache_prompt", False)
    asyncio.run(ask(pool, prompt=LONG))
    object.__setattr__(pool.settings, "cache_prompt", True)
    pool.down(1)
    asyncio.run(ask(pool, prompt=LONG))
    assert to == ["unix:/1", "", "", ""]


def test_what_clients_say_to_workers_is_not_given_on() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        told = {name: value for name, value in request.headers.items() if name.startswith("x-kvgraph-")}
        assert told == {"x-kvgraph-tells": "1", "x-kvgraph-name": "1"}  # the pool's own
        return httpx.Response(200, json={})

    async def main() -> None:
        headers = {f"x-kvgraph-{name}": "unix:/tmp/a" for name in ("copy-to", "reads", "said", "run", "name")}
        async with client_of(pool_of(answer)) as client:
            reply = await client.post(
                "/completion", json={"prompt": LONG, "x_kvgraph_said": [1]}, headers=headers
            )
        assert reply.status_code == 200

    asyncio.run(main())


def test_who_reads_knows_less_of_a_talk_than_who_answers() -> None:
    """A turn of a long talk is read where the talk is, also when it is long itself."""
    by: list[int] = []

    def worker(number: int) -> Handler:
        async def answer(request: httpx.Request) -> httpx.Response:
            by.append(number)
            return httpx.Response(200, json={})

        return answer

    pool = pool_with_reader(worker(0), worker(1))
    pool.router.copied(
        0, asked_of("/completion", "", json.dumps({"prompt": LONG}).encode(), b"", gives_seed=False).blocks
    )
    asyncio.run(ask(pool, prompt=LONG + "x" * 700))
    asyncio.run(ask(pool, prompt=LONG + "y" * 3000))
    # the reader lacks all of it: 1,500 and 700 bytes; the second time 1,500 beside 3,000
    assert by == [0, 1, 0]


def test_what_is_told_of_workers() -> None:
    """One answers, one drains, one has ended, one reads; the first one tells its metrics."""
    metrics = """# TYPE kvgraph:tokens_predicted counter
kvgraph:tokens_predicted_total 7.0
# TYPE kvgraph:cells_used gauge
kvgraph:cells_used{group="0",kind="full"} 5.0
kvgraph:cells_used{group="1",kind="window"} 2.0
"""
    goes_on = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        await goes_on.wait()
        return await fine(request)

    async def main() -> None:
        pool = Pool(Settings(n_slots=2, metrics=True), 4, n_prefill=1)
        for number, handler in enumerate((answer, gone, gone, gone)):
            client = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://worker")
            pool.up(number, client, 512, where=f"process {number}")
        pool.drains(1)
        pool.down(2)
        pool.down(3)
        come(pool, 3, gone)
        asking = asyncio.ensure_future(ask(pool, prompt="a"))
        await asyncio.sleep(0.05)
        async with client_of(pool) as client:
            found = (await client.get("/workers")).json()
        assert [(each["worker"], each["role"], each["state"]) for each in found] == [
            (0, "answers", "ready"),
            (1, "answers", "drains"),
            (2, "answers", "starts"),
            (3, "reads", "ready"),
        ]
        assert [(each["restarts"], each["requests"], each["slots"]) for each in found] == [
            (0, 1, 2),
            (0, 0, 2),
            (0, 0, 2),
            (1, 0, 2),
        ]
        assert [each["where"] for each in found] == ["process 0", "process 1", "", ""]
        assert (found[0]["tokens_predicted"], found[0]["cells_used"]) == (7, 7)
        assert all("cells_used" not in each for each in found[1:])
        goes_on.set()
        assert (await asking).status_code == 200

    asyncio.run(main())


def test_workers_are_told_to_who_has_a_key() -> None:
    async def main() -> list[int]:
        async with client_of(pool_of(fine, api_keys=("secret",))) as client:
            keys = ("", "other", "secret")
            asked = [client.get("/workers", headers={"Authorization": f"Bearer {key}"}) for key in keys]
            return [(await each).status_code for each in asked]

    assert asyncio.run(main()) == [401, 401, 200]


def test_a_slot_of_a_worker_that_reads() -> None:
    """It is one of those that are told, and answers who wants it."""
    pool = pool_with_reader(gone, fine)
    reply = asyncio.run(ask(pool, prompt=LONG, id_slot=2))
    assert json.loads(reply.json()["body"])["id_slot"] == 2
    assert pool.prefill.n_requests(1) == 0

"""The address of all workers: which path leads where, and what is told of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pykvgraph.cluster.asked import Asked, asked_of
from pykvgraph.cluster.forward import Forwarded
from pykvgraph.cluster.life import Life
from pykvgraph.cluster.of_all import counts_of, labelled
from pykvgraph.cluster.router import Router, Ticket, reader_for
from pykvgraph.openai.errors import WireError, invalid, loading, unsupported
from pykvgraph.server.app import ANSWERERS, LARGE, Endpoint, no_such_path
from pykvgraph.server.http import page_files
from pykvgraph.server.http.body import Bodies
from pykvgraph.server.http.cors import Cors
from pykvgraph.server.http.keys import Keys, key_of
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.settings import Settings

_PATIENCE = 60.0  # seconds that a request waits for a worker to come back
_NOTICE = 1.0  # seconds in which it is seen that a worker has ended
_TELLING = 5.0  # seconds in which a worker must tell of itself

Work = Callable[[Request], Awaitable[ASGIApp]]


class Worker(NamedTuple):
    """One that can be asked."""

    number: int
    client: httpx.AsyncClient


class Front:
    """Knows which of its n workers can be asked. up(), drains(), down(): as who starts them tells it.

    on_ready: is told when each of them has been up. n_prefill: the last of them, which read long prompts for
    the others. replicates: what one of the others has of a text, a second one gets too.
    """

    def __init__(
        self,
        settings: Settings,
        n: int,
        on_ready: Callable[[], None] = lambda: None,
        *,
        n_prefill: int = 0,
        replicates: bool = False,
    ) -> None:
        self.settings = settings
        self._bodies = Bodies(settings.max_body, settings.body_seconds)
        self.copies = n_prefill > 0 or replicates
        self._n = n
        self._n_prefill = n_prefill
        self._replicates = replicates
        self._awaited = set(range(n))
        self._on_ready = on_ready
        self.router = Router(settings.n_slots)
        self.prefill = Router(settings.n_slots)  # of those that only read
        self.names = map(str, itertools.count(1))  # of requests
        self._clients: dict[int, httpx.AsyncClient] = {}
        self._lives: weakref.WeakKeyDictionary[httpx.AsyncClient, Life] = weakref.WeakKeyDictionary()
        self._addresses: dict[int, str] = {}
        self._where: dict[int, str] = {}
        self._n_lives = dict.fromkeys(range(n), 0)
        self._was_up = False
        self._news = asyncio.Event()

    def up(
        self, number: int, client: httpx.AsyncClient, n_tokens: int, address: str = "", where: str = ""
    ) -> Life:
        """A worker can be asked. n_tokens: that it has room for. address: where it takes copies.

        where: its process, as people are told. Whoever knows it tells its life of what it reads, and its end.
        """
        life = self._lives[client] = Life()
        self._was_up = True
        self._where[number] = where
        self._n_lives[number] += 1
        self._clients[number] = client
        self._addresses[number] = address
        self._router_of(number).add(number, n_tokens)
        self._tell()
        if self._awaited:
            self._awaited.discard(number)
            if not self._awaited:
                self._on_ready()
        return life

    def life_of(self, client: httpx.AsyncClient) -> Life:
        """The life of a worker that this client asks."""
        return self._lives[client]

    def drains(self, number: int) -> None:
        """It ends when what it is asked has ended, and gets nothing new."""
        self._router_of(number).drain(number)

    def down(self, number: int) -> None:
        """It can't any more."""
        self._clients.pop(number, None)
        self._router_of(number).remove(number)
        self._tell()

    async def place(
        self, asked: Asked, failed: Collection[httpx.AsyncClient] = ()
    ) -> tuple[int, httpx.AsyncClient]:
        """Who is to answer. While there is nobody, waits. Raises WireError when nobody comes.

        failed: of workers that it must not be; when there is no other, what has become of them is awaited.
        """
        if not self._was_up:
            raise loading()
        begin = time.monotonic()
        while True:
            number = self._choose(asked, failed)
            end = begin + (_PATIENCE if number is None else _NOTICE)
            if number is not None:
                client = self._clients[number]
                if client not in failed or time.monotonic() >= end:
                    return number, client
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(end - time.monotonic(), 0))
                continue
            if number is None:
                raise WireError(503, "unavailable_error", "no worker answers: ask again later")

    def enter(self, number: int, asked: Asked) -> Ticket:
        """A worker gets this."""
        return self._router_of(number).enter(number, asked.blocks, asked.weight)

    def reader_for(self, asked: Asked, number: int) -> Worker | None:
        """Who reads the prompt for a worker, which answers then; None: it does so itself."""
        if asked.slot >= 0:
            return None
        reader = reader_for(number, asked.blocks, self.router, self.prefill)
        if reader is None:
            return None
        return Worker(reader, self._clients[reader])

    async def lives(self, client: httpx.AsyncClient) -> bool:
        """Whether a worker says that it does, in time; one that drains hears nobody new, and lives."""
        if client.is_closed:
            return False
        try:
            return (await client.get("/health", timeout=_TELLING)).status_code == 200
        except httpx.TimeoutException:
            return False
        except httpx.TransportError:  # if it has ended, what it was asked fails, too
            return True

    def address_of(self, number: int) -> str:
        """Where a worker takes copies."""
        return self._addresses.get(number, "")

    def second_for(self, asked: Asked, number: int) -> str:
        """Where copies of what a worker decodes for this go; "": nowhere. The router learns of it."""
        if not self._replicates or not asked.blocks:
            return ""
        second = self.router.choose(asked.blocks, without=(number,))
        if second is None or second == number:
            return ""
        self.router.copied(second, asked.blocks)
        return self.address_of(second)

    def _router_of(self, number: int) -> Router:
        return self.prefill if number >= self._n - self._n_prefill else self.router

    def _choose(self, asked: Asked, failed: Collection[httpx.AsyncClient]) -> int | None:
        number = asked.slot // self.settings.n_slots
        if not 0 <= number < self._n:  # any; a worker refuses a slot that nobody has
            without = [each for each, client in self._clients.items() if client in failed] if failed else ()
            return self.router.choose(asked.blocks, without)
        return number if number in self._router_of(number).workers else None

    def _tell(self) -> None:
        """Wakes who waits, once."""
        self._news.set()
        self._news = asyncio.Event()

    async def of_all(self, path: str, request: Request) -> dict[int, httpx.Response]:
        """What each worker that answers says, by its number. Raises WireError when none does."""
        if not self._clients:
            raise loading()
        names = ("authorization", "x-api-key")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        numbers = sorted(self._clients)
        asked = [self._clients[number].get(path, headers=headers, timeout=_TELLING) for number in numbers]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return {
            number: each
            for number, each in zip(numbers, found, strict=True)
            if isinstance(each, httpx.Response)
        }

    async def health(self, request: Request) -> ASGIApp:
        """Whether anybody can be asked."""
        if not self._clients:
            raise loading()
        return JsonReply({"status": "ok"})

    async def props(self, request: Request) -> ASGIApp:
        """What each worker was started with; the slots are those of all."""
        for reply in (await self.of_all("/props", request)).values():
            told = reply.json()
            if "total_slots" in told:
                told["total_slots"] *= self._n - self._n_prefill
            return JsonReply(told, reply.status_code)
        raise loading()

    async def slots(self, request: Request) -> ASGIApp:
        """Who is answered, by all workers: worker k has the slots from k * n_slots on."""
        found: list[dict[str, Any]] = []
        for number, reply in (await self.of_all("/slots", request)).items():
            if reply.status_code != 200:
                return Response(reply.content, reply.status_code, media_type=reply.headers["content-type"])
            found += [{**slot, "worker": number} for slot in reply.json()]
        answering = [slot for slot in found if slot["worker"] < self._n - self._n_prefill]
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in answering):
            raise WireError(503, "unavailable_error", "no slot available")
        return JsonReply(found)

    async def workers(self, request: Request) -> ASGIApp:
        """What each worker is and does now, and with `--metrics` what it has done."""
        looks = [self._look(number) for number in range(self._n)]  # before workers are asked, which may end
        replies = await self.of_all("/metrics", request) if self.settings.metrics and self._clients else {}
        counts = {number: counts_of(reply.text) for number, reply in replies.items() if reply.is_success}
        return JsonReply([look | counts.get(look["worker"], {}) for look in looks])

    def _look(self, number: int) -> dict[str, Any]:
        router = self._router_of(number)
        is_up = number in self._clients
        return {
            "worker": number,
            "role": "reads" if router is self.prefill else "answers",
            "state": "starts" if not is_up else "ready" if number in router.workers else "drains",
            "where": self._where.get(number, "") if is_up else "",
            "restarts": max(self._n_lives[number] - 1, 0),
            "slots": self.settings.n_slots,
            "requests": router.n_requests(number),
        }

    async def metrics(self, request: Request) -> ASGIApp:
        """Each worker's, with its number as a label."""
        texts = {}
        for number, reply in (await self.of_all("/metrics", request)).items():
            if reply.status_code != 200:
                return Response(reply.content, reply.status_code, media_type=reply.headers["content-type"])
            texts[number] = reply.text
        return Response(labelled(texts), media_type="text/plain; version=0.0.4")

    async def cells(self, request: Request) -> ASGIApp:
        """Those of one worker: `?worker=K`, or the first that can be asked."""
        workers = self.router.workers
        given = request.query_params.get("worker", str(workers[0]) if workers else "0")
        if given not in map(str, range(self._n)):
            raise invalid(f"worker must be from 0 to {self._n - 1}, got {given[:40]!r}")
        return Forwarded(self, "GET", Asked("/cells", b"", slot=int(given) * self.settings.n_slots))

    async def slot_action(self, request: Request) -> ASGIApp:
        """Of the worker that has the slot."""
        given = request.path_params["id_slot"]
        if not given.isdecimal() or len(given) > 9:
            raise invalid("Invalid slot ID")
        body = await self._body(request)
        path = f"{request.scope['path']}?{_query(request)}"
        return Forwarded(self, "POST", Asked(path, body, slot=int(given)))

    async def set_adapters(self, request: Request) -> ASGIApp:
        """Workers come and go, and each would have its own scales."""
        raise unsupported("With several workers scales are set by --lora-scaled, or by a request's `lora`")

    async def by_any(self, request: Request) -> ASGIApp:
        """What every worker would say."""
        body = b""
        if request.method == "POST":
            body = await self._body(request)
        path = str(request.scope["raw_path"], "latin-1")  # a model's name may have any sign
        return Forwarded(self, request.method, Asked(path, body))

    async def by_one(self, request: Request) -> ASGIApp:
        """What one worker works at."""
        body = await self._body(request)
        path, query, key = request.scope["path"], _query(request), key_of(request)
        gives_seed = self.settings.defaults.get("seed", -1) == -1

        def read() -> Asked:
            return asked_of(
                path, query, body, key, gives_seed=gives_seed, cache_prompt=self.settings.cache_prompt
            )

        return Forwarded(self, "POST", await asyncio.to_thread(read) if len(body) > LARGE else read())

    async def _body(self, request: Request) -> bytes:
        async with self._bodies.of(request) as body:
            return bytes(body)


def front_app(front: Front) -> ASGIApp:
    """The application, with keys and CORS in front, as each server has them."""
    told: list[tuple[str, str, Work]] = [
        ("GET", "/health", front.health),
        ("GET", "/v1/health", front.health),
        ("GET", "/models", front.by_any),
        ("GET", "/v1/models", front.by_any),
        ("GET", "/v1/models/{name:path}", front.by_any),
        ("GET", "/props", front.props),
        ("POST", "/props", front.by_any),
        ("GET", "/slots", front.slots),
        ("POST", "/slots/{id_slot}", front.slot_action),
        ("GET", "/metrics", front.metrics),
        ("GET", "/workers", front.workers),
        ("GET", "/lora-adapters", front.by_any),
        ("POST", "/lora-adapters", front.set_adapters),
        ("GET", "/cells", front.cells),
        *(("POST", path, front.by_one) for path in ANSWERERS),
    ]
    if front.settings.page:
        told += [("GET", path, front.by_any) for path in page_files.FILES]
    routes = [Route(path, _Forward(work), methods=[method]) for method, path, work in told]
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_such_path})
    app.router.redirect_slashes = False  # as each server's
    return Cors(Keys(app, front.settings.api_keys))


def _query(request: Request) -> str:
    """As it came: a URL would be made with the header `Host`, which may say anything."""
    return str(request.scope["query_string"], "latin-1")


class _Forward(Endpoint):
    def __init__(self, work: Work) -> None:
        self._work = work

    async def _reply(self, request: Request) -> ASGIApp:
        return await self._work(request)

"""The address of all workers: which path leads where, and what is told of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pykvgraph.cluster.asked import WorkerRequest, asked_of
from pykvgraph.cluster.forward import ForwardedRequest
from pykvgraph.cluster.of_all import counts_of, labelled
from pykvgraph.cluster.pool import TELLING, Pool
from pykvgraph.openai.errors import invalid, loading, unavailable, unsupported
from pykvgraph.server.app import LARGE, WITH_BODY, Endpoint, no_such_path
from pykvgraph.server.http import page_files
from pykvgraph.server.http.body import Bodies
from pykvgraph.server.http.cors import Cors
from pykvgraph.server.http.keys import Keys, key_of
from pykvgraph.server.http.reply import JsonReply

Work = Callable[[Request], Awaitable[ASGIApp]]


class Front:
    """Answers for all workers of a pool, or lets one of them answer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._settings = pool.settings
        self._bodies = Bodies(pool.settings.max_body, pool.settings.body_seconds)

    async def of_all(self, path: str, request: Request) -> dict[int, httpx.Response]:
        """What each worker that answers says, by its number. Raises WireError when none does."""
        if not self._pool.clients:
            raise loading()
        names = ("authorization", "x-api-key")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        numbers = sorted(self._pool.clients)
        asked = [self._pool.clients[number].get(path, headers=headers, timeout=TELLING) for number in numbers]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return {
            number: each
            for number, each in zip(numbers, found, strict=True)
            if isinstance(each, httpx.Response)
        }

    async def health(self, request: Request) -> ASGIApp:
        """Whether anybody can be asked."""
        if not self._pool.clients:
            raise loading()
        return JsonReply({"status": "ok"})

    async def props(self, request: Request) -> ASGIApp:
        """What each worker was started with; the slots are those of all."""
        for reply in (await self.of_all("/props", request)).values():
            told = reply.json()
            if "total_slots" in told:
                told["total_slots"] *= self._pool.n_answering
            return JsonReply(told, reply.status_code)
        raise loading()

    async def slots(self, request: Request) -> ASGIApp:
        """Who is answered, by all workers: worker k has the slots from k * n_slots on."""
        found: list[dict[str, Any]] = []
        for number, reply in (await self.of_all("/slots", request)).items():
            if reply.status_code != 200:
                return Response(reply.content, reply.status_code, media_type=reply.headers["content-type"])
            found += [{**slot, "worker": number} for slot in reply.json()]
        answering = [slot for slot in found if slot["worker"] < self._pool.n_answering]
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in answering):
            raise unavailable("no slot available")
        return JsonReply(found)

    async def workers(self, request: Request) -> ASGIApp:
        """What each worker is and does now, and with `--metrics` what it has done."""
        looks = [
            self._pool.look(number) for number in range(self._pool.n)
        ]  # before workers are asked, which may end
        replies = (
            await self.of_all("/metrics", request) if self._settings.metrics and self._pool.clients else {}
        )
        counts = {number: counts_of(reply.text) for number, reply in replies.items() if reply.is_success}
        return JsonReply([look | counts.get(look["worker"], {}) for look in looks])

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
        workers = self._pool.router.workers
        given = request.query_params.get("worker", str(workers[0]) if workers else "0")
        if given not in map(str, range(self._pool.n)):
            raise invalid(f"worker must be from 0 to {self._pool.n - 1}, got {given[:40]!r}")
        return ForwardedRequest(
            self._pool, "GET", WorkerRequest("/cells", b"", slot=int(given) * self._settings.n_slots)
        )

    async def slot_action(self, request: Request) -> ASGIApp:
        """Of the worker that has the slot."""
        given = request.path_params["id_slot"]
        if not given.isdecimal() or len(given) > 9:
            raise invalid("Invalid slot ID")
        body = await self._body(request)
        path = f"{request.scope['path']}?{_query(request)}"
        return ForwardedRequest(self._pool, "POST", WorkerRequest(path, body, slot=int(given)))

    async def set_adapters(self, request: Request) -> ASGIApp:
        """Workers come and go, and each would have its own scales."""
        raise unsupported("With several workers scales are set by --lora-scaled, or by a request's `lora`")

    async def by_any(self, request: Request) -> ASGIApp:
        """What every worker would say."""
        body = b""
        if request.method == "POST":
            body = await self._body(request)
        path = str(request.scope["raw_path"], "latin-1")  # a model's name may have any sign
        return ForwardedRequest(self._pool, request.method, WorkerRequest(path, body))

    async def by_one(self, request: Request) -> ASGIApp:
        """What one worker works at."""
        body = await self._body(request)
        path, query, key = request.scope["path"], _query(request), key_of(request)
        gives_seed = self._settings.defaults.get("seed", -1) == -1

        def read() -> WorkerRequest:
            return asked_of(
                path, query, body, key, gives_seed=gives_seed, cache_prompt=self._settings.cache_prompt
            )

        return ForwardedRequest(
            self._pool, "POST", await asyncio.to_thread(read) if len(body) > LARGE else read()
        )

    async def _body(self, request: Request) -> bytes:
        async with self._bodies.of(request) as body:
            return bytes(body)


def front_app(pool: Pool) -> ASGIApp:
    """The application, with keys and CORS in front, as each server has them."""
    front = Front(pool)
    told: list[tuple[str, str, Work]] = [
        ("GET", "/health", front.health),
        ("GET", "/v1/health", front.health),
        ("GET", "/models", front.by_any),
        ("GET", "/v1/models", front.by_any),
        ("GET", "/v1/models/{name:path}", front.by_any),
        ("GET", "/props", front.props),
        ("POST", "/props", front.by_any),
        ("GET", "/tokenizer_info", front.by_any),
        ("GET", "/slots", front.slots),
        ("POST", "/slots/{id_slot}", front.slot_action),
        ("GET", "/metrics", front.metrics),
        ("GET", "/workers", front.workers),
        ("GET", "/lora-adapters", front.by_any),
        ("POST", "/lora-adapters", front.set_adapters),
        ("GET", "/cells", front.cells),
        *(("POST", path, front.by_one) for path in WITH_BODY),
    ]
    if pool.settings.page:
        told += [("GET", path, front.by_any) for path in page_files.FILES]
    routes = [Route(path, _Forward(work), methods=[method]) for method, path, work in told]
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_such_path})
    app.router.redirect_slashes = False  # as each server's
    return Cors(Keys(app, pool.settings.api_keys), pool.settings.cors_origins)


def _query(request: Request) -> str:
    """As it came: a URL would be made with the header `Host`, which may say anything."""
    return str(request.scope["query_string"], "latin-1")


class _Forward(Endpoint):
    def __init__(self, work: Work) -> None:
        self._work = work

    async def _reply(self, request: Request) -> ASGIApp:
        return await self._work(request)

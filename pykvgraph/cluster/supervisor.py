"""Keeps workers alive, whatever they are: starts them again when they end, more and more seldom."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
import sys
import time

import httpx

from pykvgraph.cluster.order import WorkerReady
from pykvgraph.cluster.pool import Pool
from pykvgraph.cluster.worker_life import WorkerLife
from pykvgraph.errors import KVGraphError
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.http.keys import RUN_HEADER

_log = logging.getLogger("pykvgraph.server")
FIRST_DELAY, LONGEST_DELAY = 0.1, 30.0  # seconds before a worker is started again; doubled each time
CALM_SECONDS = 60.0  # a worker that lived so long begins with the first delay again
LOOK_SECONDS = 10.0  # between two questions whether a worker lives
HUNG_SECONDS = 30.0  # in which it must answer
_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 30.0  # less than after which a worker closes a connection that is idle


class Supervisor:
    """n workers with an engine each, numbered from 0; what they are, subclasses say.

    The pool is told in the event loop of run() when one can be asked, drains, and can't be asked any more.
    A worker that gets SIGTERM drains: it gets nothing new, and ends when it has answered what it was asked.
    One that ends is started again, after a delay that grows up to LONGEST_DELAY; its cache has as many cells
    as before. One that hangs is killed, so that others answer what it was asked. Workers answer nobody
    without the token of this run.
    """

    def __init__(self, pool: Pool, engine: EngineSpec, n: int) -> None:
        self.n_restarts = 0
        self._pool = pool
        self._engine = engine
        self._n = n
        self._n_ctx: dict[int, int] = {}  # of a worker's first life, as then the memory was free
        self._drained: set[int] = set()
        self._hung: set[int] = set()
        self._watches: dict[int, asyncio.Future[None]] = {}
        self._token = secrets.token_hex(32)
        self._stops = asyncio.Event()
        self._was_up = False  # any of them, ever

    async def run(self) -> None:
        """Until stop(), and all of them have ended.

        Raises KVGraphError when one ends before any of them was ready: it would end again.
        """
        keeping = [asyncio.ensure_future(self._keep(number)) for number in range(self._n)]
        try:
            await asyncio.gather(*keeping)
        except BaseException:
            self.stop()
            await asyncio.wait(keeping)
            raise

    def stop(self) -> None:
        """Drains all of them, and starts none again."""
        self._stops.set()

    async def _keep(self, number: int) -> None:
        delay = FIRST_DELAY
        for life in range(sys.maxsize):
            if self._stops.is_set():
                return
            begin = time.monotonic()
            end = await self._live(number, life)
            if self._stops.is_set():
                return
            if not self._was_up:
                raise KVGraphError(f"worker {number} ended before it was ready ({end})")
            drained = number in self._drained
            self._drained.discard(number)
            if drained or time.monotonic() - begin > CALM_SECONDS:
                delay = FIRST_DELAY
            if not drained:
                _log.warning("worker %d ended (%s); it is started again in %g s", number, end, delay)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stops.wait(), delay)
                return
            delay = min(2 * delay, LONGEST_DELAY)
            self.n_restarts += 1

    async def _live(self, number: int, life: int) -> str:
        """One life of a worker, the life-th; how it ended."""
        raise NotImplementedError

    def _order(self, number: int) -> str:
        """What a worker has to do, as read_order() reads it; without line ends."""
        n_slots = self._pool.settings.n_slots
        settings = dataclasses.replace(
            self._pool.settings, run_token=self._token, first_slot=number * n_slots
        )
        context = dict(self._engine.context)
        if context.get("n_ctx") == "auto" and number in self._n_ctx:
            context["n_ctx"] = self._n_ctx[number]
        engine = dataclasses.replace(self._engine, context=context)
        order = {
            "number": number,
            "settings": dataclasses.asdict(settings),
            "engine": dataclasses.asdict(engine),
            "copies": self._pool.copies,
        }
        return json.dumps(order)

    def _up(self, number: int, client: httpx.AsyncClient, told: WorkerReady, where: str) -> WorkerLife:
        """It is ready. where: for whoever wants to drain it."""
        self._was_up = True
        self._n_ctx.setdefault(number, told.n_ctx)
        _log.info("worker %d is ready (%s)", number, where)
        self._watches[number] = asyncio.ensure_future(self._watch(number, client))
        return self._pool.up(number, client, told.n_tokens, told.copies_at, where)

    def _fault(self, number: int, crash: str) -> str:
        """What a worker that has ended did. crash: how it ended; "": others may have ended it."""
        is_hung = number in self._hung
        self._hung.discard(number)
        return f"it said nothing for {HUNG_SECONDS:g} s" if is_hung else crash

    def _down(self, number: int) -> None:
        """It is gone, or about to be."""
        if number in self._watches:
            self._watches.pop(number).cancel()
        self._pool.down(number)

    async def _watch(self, number: int, client: httpx.AsyncClient) -> None:
        """Until it says nothing, as a process that is stopped. A device that hangs is not seen here."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await client.get("/health", timeout=HUNG_SECONDS)
            except httpx.TimeoutException:
                _log.warning("worker %d has said nothing for %g s, and is killed", number, HUNG_SECONDS)
                self._hung.add(number)
                self._kill(number)
                return
            except httpx.TransportError:  # it drains, or has ended, which is seen elsewhere
                continue

    def _kill(self, number: int) -> None:
        """Ends its process, whatever that does."""
        raise NotImplementedError

    def _drains(self, number: int) -> None:
        if not self._stops.is_set():
            _log.info("worker %d drains; another one takes its place then", number)
            self._drained.add(number)
            self._pool.drains(number)

    def _client(self, url: str, socket: str | None = None) -> httpx.AsyncClient:
        """socket: a Unix socket's path."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_SECONDS)
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket, limits=limits),
            base_url=url,
            headers={RUN_HEADER: self._token},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            trust_env=False,
        )

"""The workers of a cluster: which of them can be asked, and who gets what."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import httpx

from pykvgraph.cluster.asked import WorkerRequest
from pykvgraph.cluster.router import Router, Ticket, reader_for
from pykvgraph.cluster.worker_life import WorkerLife
from pykvgraph.openai.errors import loading, unavailable
from pykvgraph.server.settings import Settings

_PATIENCE = 60.0  # seconds that a request waits for a worker to come back
_NOTICE = 1.0  # seconds in which it is seen that a worker has ended
TELLING = 5.0  # seconds in which a worker must tell of itself


class Worker(NamedTuple):
    """One that can be asked."""

    number: int
    client: httpx.AsyncClient


class Pool:
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
        self.copies = n_prefill > 0 or replicates
        self.n = n
        self.n_answering = n - n_prefill
        self._replicates = replicates
        self._awaited = set(range(n))
        self._on_ready = on_ready
        self.router = Router(settings.n_slots)
        self.prefill = Router(settings.n_slots)  # of those that only read
        self.names = map(str, itertools.count(1))  # of requests
        self.clients: dict[int, httpx.AsyncClient] = {}
        self._lives: weakref.WeakKeyDictionary[httpx.AsyncClient, WorkerLife] = weakref.WeakKeyDictionary()
        self._addresses: dict[int, str] = {}
        self._where: dict[int, str] = {}
        self._n_lives = dict.fromkeys(range(n), 0)
        self._was_up = False
        self._news = asyncio.Event()

    def up(
        self, number: int, client: httpx.AsyncClient, n_tokens: int, address: str = "", where: str = ""
    ) -> WorkerLife:
        """A worker can be asked. n_tokens: that it has room for. address: where it takes copies.

        where: its process, as people are told. Whoever knows it tells its life of what it reads, and its end.
        """
        life = self._lives[client] = WorkerLife()
        self._was_up = True
        self._where[number] = where
        self._n_lives[number] += 1
        self.clients[number] = client
        self._addresses[number] = address
        self._router_of(number).add(number, n_tokens)
        self._tell()
        if self._awaited:
            self._awaited.discard(number)
            if not self._awaited:
                self._on_ready()
        return life

    def life_of(self, client: httpx.AsyncClient) -> WorkerLife:
        """The life of a worker that this client asks."""
        return self._lives[client]

    def drains(self, number: int) -> None:
        """It ends when what it is asked has ended, and gets nothing new."""
        self._router_of(number).drain(number)

    def down(self, number: int) -> None:
        """It can't any more."""
        self.clients.pop(number, None)
        self._router_of(number).remove(number)
        self._tell()

    async def place(
        self, asked: WorkerRequest, failed: Collection[httpx.AsyncClient] = ()
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
                client = self.clients[number]
                if client not in failed or time.monotonic() >= end:
                    return number, client
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(end - time.monotonic(), 0))
                continue
            if number is None:
                raise unavailable("no worker answers: ask again later")

    def enter(self, number: int, asked: WorkerRequest) -> Ticket:
        """A worker gets this."""
        return self._router_of(number).enter(number, asked.blocks, asked.weight)

    def reader_for(self, asked: WorkerRequest, number: int) -> Worker | None:
        """Who reads the prompt for a worker, which answers then; None: it does so itself."""
        if asked.slot >= 0:
            return None
        reader = reader_for(number, asked.blocks, self.router, self.prefill)
        if reader is None:
            return None
        return Worker(reader, self.clients[reader])

    async def lives(self, client: httpx.AsyncClient) -> bool:
        """Whether a worker says that it does, in time; one that drains hears nobody new, and lives."""
        if client.is_closed:
            return False
        try:
            return (await client.get("/health", timeout=TELLING)).status_code == 200
        except httpx.TimeoutException:
            return False
        except httpx.TransportError:  # if it has ended, what it was asked fails, too
            return True

    def address_of(self, number: int) -> str:
        """Where a worker takes copies."""
        return self._addresses.get(number, "")

    def second_for(self, asked: WorkerRequest, number: int) -> str:
        """Where copies of what a worker decodes for this go; "": nowhere. The router learns of it."""
        if not self._replicates or not asked.blocks:
            return ""
        second = self.router.choose(asked.blocks, without=(number,))
        if second is None or second == number:
            return ""
        self.router.copied(second, asked.blocks)
        return self.address_of(second)

    def look(self, number: int) -> dict[str, Any]:
        """What a worker is and does now."""
        router = self._router_of(number)
        is_up = number in self.clients
        return {
            "worker": number,
            "role": "reads" if router is self.prefill else "answers",
            "state": "starts" if not is_up else "ready" if number in router.workers else "drains",
            "where": self._where.get(number, "") if is_up else "",
            "restarts": max(self._n_lives[number] - 1, 0),
            "slots": self.settings.n_slots,
            "requests": router.n_requests(number),
        }

    def _router_of(self, number: int) -> Router:
        return self.prefill if number >= self.n_answering else self.router

    def _choose(self, asked: WorkerRequest, failed: Collection[httpx.AsyncClient]) -> int | None:
        number = asked.slot // self.settings.n_slots
        if not 0 <= number < self.n:  # any; a worker refuses a slot that nobody has
            without = [each for each, client in self.clients.items() if client in failed] if failed else ()
            return self.router.choose(asked.blocks, without)
        return number if number in self._router_of(number).workers else None

    def _tell(self) -> None:
        """Wakes who waits, once."""
        self._news.set()
        self._news = asyncio.Event()

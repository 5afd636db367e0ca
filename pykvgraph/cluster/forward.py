"""A request on its way to a worker and its answer on its way back, whatever happens to the worker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
from starlette.types import Receive, Scope, Send

from pykvgraph.cluster.asked import WorkerRequest, with_field
from pykvgraph.cluster.pool import Pool, Worker
from pykvgraph.cluster.replay import RepeatError, Replay
from pykvgraph.openai.errors import SERVER, WireError, error_body, invalid
from pykvgraph.openai.wire_json import dumps
from pykvgraph.server.http.asker import (
    COPY_TO_HEADER,
    NAME_HEADER,
    READS_HEADER,
    SAID_COMMENT,
    SAID_FIELD,
    SAID_HEADER,
    TELLS_HEADER,
)
from pykvgraph.server.http.reply import JsonReply, send_within, unless_gone

if TYPE_CHECKING:
    from pykvgraph.cluster.router import Ticket
    from pykvgraph.cluster.worker_life import WorkerLife

_log = logging.getLogger("pykvgraph.server")
MOST_REPEATS = 3  # to other workers
MOST_DEATHS = 2  # of workers that had the request, and had said nothing of its answer
_LOOK = 2.0  # seconds after which, again and again, a worker that reads must say that it lives
_GIVEN_ON = (b"authorization", b"x-api-key", b"content-type")
_OF_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding")


class ForwardedRequest:
    """The answer of one of the workers, byte for byte.

    When a worker goes away the request is sent again to another one, up to MOST_REPEATS times, and what the
    client has already is left out. But not when the worker hung or crashed while it read this request, or
    when MOST_DEATHS of them have ended before they said a word of its answer: it would end the next one, too.
    A client that goes away closes the connection to the worker, which ends
    the request there.
    """

    def __init__(self, pool: Pool, method: str, asked: WorkerRequest) -> None:
        self._pool = pool
        self._method = method
        self._asked = asked
        self._name = next(pool.names)
        self._n_deaths = 0
        self._has_word = False  # of the worker that is asked now
        self._streams = False  # the client has the head of a stream
        self._said: list[bytes] = []  # tokens of the stream, as the last worker has told them
        self._known: list[bytes] = []  # as any worker has

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        patient = functools.partial(send_within, self._pool.settings.io_seconds, send)
        work = asyncio.ensure_future(self._answer(scope, patient))
        try:
            await unless_gone(work, receive)
        finally:
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _answer(self, scope: Scope, send: Send) -> None:
        try:
            await self._first_that_lives(scope, send)
        except WireError as error:
            body = error_body(scope["path"], error)
            if not self._streams:
                await JsonReply(body, error.code)(scope, _nothing, send)
                return
            name = b"event: error\n" if "type" in body else b""
            event = b"%bdata: %b\n\n" % (name, dumps(body))
            await send({"type": "http.response.body", "body": event})

    async def _first_that_lives(self, scope: Scope, send: Send) -> None:
        """Raises WireError."""
        replay = Replay()
        failed: set[httpx.AsyncClient] = set()  # one is of one life of a worker
        what = "its workers ended"
        for _ in range(1 + MOST_REPEATS):
            number, client = await self._pool.place(self._asked, failed)
            reader = self._pool.reader_for(self._asked, number)
            ticket = self._pool.enter(number, self._asked)
            try:
                if reader is not None:
                    await self._read_by(reader, number, scope)
                if await self._ask(number, client, scope, send, replay):
                    return
            except httpx.TransportError as error:
                _log.info("worker %d: %s", number, type(error).__name__)
                await self._require_innocent(error, number, self._pool.life_of(client))
            except RepeatError as error:  # the last bit of a logit may decide what is drawn: not each time
                what = str(error)
            finally:
                ticket.leave()
            failed.add(client)
            try:
                replay.again()
            except RepeatError as error:
                raise _failed(str(error)) from None
        raise _failed(f"the request was tried {1 + MOST_REPEATS} times: {what}")

    async def _require_innocent(self, error: httpx.TransportError, number: int, life: WorkerLife) -> None:
        """Raises WireError when the next worker is likely to end by this request as well."""
        if self._has_word or isinstance(error, httpx.ConnectError):
            return
        self._n_deaths += 1
        if fault := await life.ended_by(self._name):
            raise _guilty(f"worker {number} ended while it read this request ({fault})")
        if self._n_deaths == MOST_DEATHS:
            raise _guilty(f"{MOST_DEATHS} workers ended while they had this request")

    async def _read_by(self, reader: Worker, number: int, scope: Scope) -> None:
        """Another worker reads the prompt, and sends what it has of it to worker `number`.

        When that fails, worker `number` reads it itself; a bad request is refused by it, too. So it does when
        the reader doesn't even say that it lives; that one keeps its ticket until it is back, or has ended.
        """
        blocks = self._asked.blocks
        ticket = self._pool.prefill.enter(reader.number, blocks, len(self._asked.body))  # while it is there
        reading = asyncio.ensure_future(self._read(reader, number, scope, ticket))
        try:
            while not (await asyncio.wait({reading}, timeout=_LOOK))[0]:
                if not await self._pool.lives(reader.client):
                    _log.warning("worker %d, which was to read a prompt, says nothing", reader.number)
                    reading.add_done_callback(_heard)
                    if self._pool.life_of(reader.client).reads(self._name):
                        raise _guilty(f"worker {reader.number} says nothing while it reads this request")
                    return
        except asyncio.CancelledError:
            reading.cancel()
            raise
        await reading

    async def _read(self, reader: Worker, number: int, scope: Scope, ticket: Ticket) -> None:
        told = [(READS_HEADER, "1"), (COPY_TO_HEADER, self._pool.address_of(number))]
        try:
            response = await self._sent(reader.client, scope, told)
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            _log.info("worker %d, which was to read a prompt: %s", reader.number, type(error).__name__)
            await self._require_innocent(error, reader.number, self._pool.life_of(reader.client))
        finally:
            ticket.leave()

    async def _sent(
        self,
        client: httpx.AsyncClient,
        scope: Scope,
        told: list[tuple[str, str]],
        said: Sequence[bytes] = (),
    ) -> httpx.Response:
        """What a worker answers, whose body is to be read. told: headers for it alone. said: tokens.

        Raises httpx.TransportError, and WireError for a head that can't be sent.
        """
        if client.is_closed:  # it has ended while another one read the prompt
            raise httpx.ConnectError("the worker has ended")
        headers = [pair for pair in scope["headers"] if pair[0] in _GIVEN_ON]
        headers += [(name.encode(), value.encode()) for name, value in (*told, (NAME_HEADER, self._name))]
        asked, body = self._asked, self._asked.body
        if said:
            body = with_field(body, SAID_FIELD, b"[%b]" % b",".join(said))
        try:
            request = client.build_request(self._method, asked.path, content=body or None, headers=headers)
            return await client.send(request, stream=True)
        except (httpx.InvalidURL, httpx.LocalProtocolError) as error:  # what our parser of heads lets pass
            raise invalid(f"the head of the request: {error}") from None

    async def _ask(
        self, number: int, client: httpx.AsyncClient, scope: Scope, send: Send, replay: Replay
    ) -> bool:
        """Whether there is an answer; False: the worker stops, and has none. Raises httpx.TransportError."""
        second = self._pool.second_for(self._asked, number)
        told = [(TELLS_HEADER, "1")] if self._asked.says else []
        told += [(COPY_TO_HEADER, second)] if second else []
        told += [(SAID_HEADER, "1")] if self._known else []
        self._said = []
        self._has_word = False
        response = await self._sent(client, scope, told, self._known)
        try:
            if response.headers.get("content-type") == "text/event-stream":
                return await self._stream(response, send, replay)
            body = await response.aread()
        finally:
            await response.aclose()
        if response.status_code == 503:
            return False
        if self._streams:
            raise _failed("the worker is gone, and another one refuses the request")
        await send(_head(response))
        await send({"type": "http.response.body", "body": body})
        return True

    async def _stream(self, response: httpx.Response, send: Send, replay: Replay) -> bool:
        """False: the worker stops, and has said no more than was sent."""
        self._has_word = True  # a stream begins with the first of them
        if not self._streams:
            self._streams = True
            await send(_head(response))
        async for events in _events(response):
            stops = _says_that_it_stops(events[-1]) if events else False
            data = b"".join(map(replay.take, self._untold(events[:-1] if stops else events)))
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if stops:
                return False
        replay.end()
        await send({"type": "http.response.body", "body": b""})
        return True

    def _untold(self, events: list[bytes]) -> list[bytes]:
        """What is for the client; tokens are remembered."""
        for event in events:
            if event.startswith(SAID_COMMENT):
                self._said += event[len(SAID_COMMENT) :].strip().split(b",")
        if len(self._said) > len(self._known):
            self._known = self._said
        return [event for event in events if not event.startswith(SAID_COMMENT)]


async def _events(response: httpx.Response) -> AsyncIterator[list[bytes]]:
    """Whole ones, as many as came at a time."""
    rest = b""
    async for data in response.aiter_raw():
        *events, rest = (rest + data).split(b"\n\n")
        yield [event + b"\n\n" for event in events]
    if rest:
        yield [rest]


def _says_that_it_stops(event: bytes) -> bool:
    """Whether it is the error with which a worker that stops ends its streams."""
    if b'"error"' not in event:
        return False
    try:
        value = json.loads(event.partition(b"data: ")[2])
        return bool(value["error"]["code"] == 503)
    except (ValueError, TypeError, KeyError):
        return False


def _head(response: httpx.Response) -> dict[str, Any]:
    headers = [pair for pair in response.headers.raw if pair[0].lower() not in _OF_CONNECTION]
    return {"type": "http.response.start", "status": response.status_code, "headers": headers}


def _heard(task: asyncio.Future[None]) -> None:
    """Nobody waits for it any more, and asyncio would tell of its error."""
    if not task.cancelled():
        task.exception()


def _guilty(what: str) -> WireError:
    return _failed(f"{what}, so no other one gets it: send a smaller or simpler one")


def _failed(message: str) -> WireError:
    return WireError(500, SERVER, message)


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}

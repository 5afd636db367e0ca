"""Answers on their way to a client: JSON, or a stream of events. A client that goes away ends its request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from pykvgraph.openai.errors import WireError, as_wire, error_body
from pykvgraph.openai.form import MANY_PROBS, Form
from pykvgraph.openai.wire_json import JSON_TYPE, dumps, dumps_in_parts
from pykvgraph.server.http.asker import SAID_COMMENT
from pykvgraph.server.job import Job
from pykvgraph.types import Piece

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # or nginx would hold events back
]
_PING = b":\n\n"
_MANY = 16  # answers, whose JSON takes a while
_UNREAD = 408, 413, 429  # there may be more of the body
_REST_SECONDS = 5.0  # in which the rest of such a body is read


class JsonReply:
    """An answer that is known. value: bytes are JSON already."""

    def __init__(self, value: Any, code: int = 200) -> None:
        self._body = value if isinstance(value, bytes) else dumps(value)
        self._code = code

    @classmethod
    def of_error(cls, error: BaseException) -> JsonReply:
        """What a client hears of an exception."""
        told = as_wire(error)
        return cls(told.body(), told.code)

    @classmethod
    def of_long(cls, value: Any) -> JsonReply:
        """What takes a while to write: for a thread, so that others get their turn meanwhile."""
        return cls(dumps_in_parts(value))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        length = (b"content-length", b"%d" % len(self._body))
        headers = [(b"content-type", JSON_TYPE), length]
        is_unread = self._code in _UNREAD
        if is_unread:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": self._code, "headers": headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": is_unread})
        if is_unread:
            await _pass_over_rest(receive)
            await send({"type": "http.response.body", "body": b""})


class WorkReply:
    """JSON that takes a while to find: a client that goes away ends the work."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        work = asyncio.ensure_future(self._work())
        try:
            if not await unless_gone(work, receive):
                return
        finally:
            work.cancel()
        try:
            reply = JsonReply(work.result())
        except Exception as error:
            reply = JsonReply.of_error(error)
        await reply(scope, _nothing, send)


class JobReply:
    """The answer of a job, in a form. streams: as events, several of them in one packet when they come fast.

    ping_seconds: after which a silent stream shows that it lives; 0: never. io_seconds: that the client may
    take for what was sent.
    """

    def __init__(
        self, job: Job, form: Form, *, streams: bool, ping_seconds: float, io_seconds: float
    ) -> None:
        self._job = job
        self._form = form
        self._streams = streams
        self._ping_seconds = ping_seconds
        self._io_seconds = io_seconds
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        work = asyncio.ensure_future(self._stream(scope, send) if self._streams else self._whole(scope, send))
        try:
            self._job.enter()
            await unless_gone(work, receive)
        finally:
            self._job.cancel()
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _whole(self, scope: Scope, send: Send) -> None:
        try:
            async for _ in self._job.said():
                pass
            samples, whole = self._job.samples, self._form.whole
            n_probs = sum(sample.n_probs * len(sample.with_probs) for sample in samples)
            if self._form.is_long or len(samples) > _MANY or n_probs > MANY_PROBS:
                reply = await asyncio.to_thread(lambda: JsonReply.of_long(whole(samples)))
            else:
                reply = JsonReply(whole(samples))
        except Exception as error:
            reply = _failure(scope, error)
        await reply(scope, _nothing, send)

    async def _stream(self, scope: Scope, send: Send) -> None:
        """Nothing is sent before the first event, so that an error until then has its code."""
        ping: asyncio.Future[None] | None = None
        try:
            async for events in self._events():
                if ping is None:
                    start = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
                    await send(start)
                    ping = asyncio.ensure_future(self._ping(send))
                await self._send(send, events)
        except Exception as error:
            if ping is None:
                await _failure(scope, error)({}, _nothing, send)
                return
            event = dumps(self._form.error(as_wire(error)))
            await self._send(send, self._form.framed(event))
        finally:
            if ping is not None:
                ping.cancel()
        await send({"type": "http.response.body", "body": self._form.closing})

    async def _events(self) -> AsyncIterator[bytes]:
        untold: list[Piece] = []
        async for sample, pieces in self._job.said():
            form, told = self._form, b""
            if pieces is None:
                events, pieces = form.progress_events(sample), []
            elif not form.is_long:
                events = form.events(sample, pieces) if pieces else form.last_events(sample)
            elif pieces:
                events = await asyncio.to_thread(form.events, sample, pieces)
            else:
                events = await asyncio.to_thread(form.last_events, sample)
            if self._job.tells:
                untold += pieces
            # whoever repeats a token knows no probability of it: the event that has it must be out, too
            if untold and (events or not sample.tells_probs):
                told = SAID_COMMENT + b"%b\n\n" % _tokens(untold)
                untold = []
            if events or told:
                yield told + b"".join(map(form.framed, events))
        if events := self._form.end(self._job.samples):
            yield b"".join(map(self._form.framed, events))

    async def _ping(self, send: Send) -> None:
        while self._ping_seconds:
            await asyncio.sleep(self._ping_seconds)
            await self._send(send, _PING)

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._sending:
            message = {"type": "http.response.body", "body": data, "more_body": True}
            await send_within(self._io_seconds, send, message)


def _failure(scope: Scope, error: BaseException) -> JsonReply:
    told = as_wire(error)
    return JsonReply(error_body(scope["path"], told), told.code)


async def send_within(seconds: float, send: Send, message: Message) -> None:
    """Cancels the task that calls it when the reader takes longer."""
    task = asyncio.current_task()
    assert task is not None
    patience = asyncio.get_running_loop().call_later(seconds, task.cancel)
    try:
        await send(message)
    finally:
        patience.cancel()


async def unless_gone(work: asyncio.Future[Any], receive: Receive) -> bool:
    """Waits for the work; False: the client went away before its end."""
    departure = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({work, departure}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        departure.cancel()
    return work.done()


async def _pass_over_rest(receive: Receive) -> None:
    """Of a body. Closed with unread bytes, a connection is reset, and the client may lose the answer."""

    async def read() -> None:
        while (await receive()).get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), _REST_SECONDS)


async def _departure(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _tokens(pieces: list[Piece]) -> bytes:
    return b",".join(b"%d" % piece.token for piece in pieces)


async def _nothing() -> dict[str, Any]:
    raise WireError(500, "server_error", "nothing is read any more")

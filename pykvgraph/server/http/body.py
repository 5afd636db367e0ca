"""The bodies of requests, within their limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from pykvgraph.openai.errors import INVALID, WireError

SHORT = 1 << 16  # bytes, at most, of a body that the event loop reads itself
_N_LONGEST = 4  # bodies of the most bytes that one may have: all long ones share so much memory


class Bodies:
    """Bodies of requests that come, or are there and not read yet. Those over SHORT bytes share their memory.

    most: bytes of one body. seconds: in which it must have come.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._n_left = _N_LONGEST * most

    @contextlib.asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytearray]:
        """All of a request's body; the end of the block gives its memory back.

        Raises WireError for one that is too long or takes too long, or when the others leave no memory for
        it, and ClientDisconnect.
        """
        n_taken = 0

        def take(size: int) -> None:
            nonlocal n_taken
            more = size - n_taken if size > SHORT else 0
            if more > self._n_left:
                raise _no_memory()
            self._n_left -= more
            n_taken += more

        try:
            yield await read_body(request, self._most, self._seconds, take)
        finally:
            self._n_left += n_taken


async def read_body(
    request: Request, most: int, seconds: float, take: Callable[[int], None] = lambda size: None
) -> bytearray:
    """All of a body. take: is told its size each time that it has grown, and may raise.

    Raises WireError for one that is too long or takes too long, and ClientDisconnect. The head of a request
    that is too long is enough.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_long(most)
    try:
        return await asyncio.wait_for(_read(request, most, take), seconds)
    except asyncio.TimeoutError:
        raise WireError(408, INVALID, f"the body did not come within {seconds:g} seconds") from None


async def _read(request: Request, most: int, take: Callable[[int], None]) -> bytearray:
    body = bytearray()  # which grows in place: its parts would be left all over the heap
    async for part in request.stream():
        if len(body) + len(part) > most:
            raise _too_long(most)
        take(len(body) + len(part))
        body += part
    return body


def _too_long(most: int) -> WireError:
    return WireError(413, INVALID, f"the body has over {most} bytes")


def _no_memory() -> WireError:
    return WireError(429, "rate_limit_error", "too many long bodies come at once: send this one again later")

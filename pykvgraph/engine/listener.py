"""Several requests that one task of an event loop listens to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from pykvgraph.engine.request import Request
from pykvgraph.types import Piece

_AT_A_TIME = 64  # requests, until other tasks of the loop have their turn


class Listener:
    """Hears requests of engines that take their steps in threads of their own.

    A task for each request would do the same, but for thousands of them the event loop stands still while
    their tasks begin and end.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._came: deque[int] = deque(range(len(requests)))  # of whom there may be news
        self._news = asyncio.Event()

    async def bunches(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """The number of a request, with what it has said by now; with an empty list when it has ended.

        Raises what ended one of them.
        """
        loop = asyncio.get_running_loop()
        wakes = [functools.partial(self._wake, loop, number) for number in range(len(self._requests))]
        n_left, n_heard = len(self._requests), 0
        try:
            while n_left:
                if not self._came:
                    self._news.clear()
                    await self._news.wait()
                number = self._came.popleft()
                pieces, has_ended = self._heard(number, wakes[number])
                if pieces:
                    yield number, pieces
                if has_ended:
                    n_left -= 1
                    yield number, []
                n_heard += 1
                if n_heard % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
        finally:
            for request, wake in zip(self._requests, wakes, strict=True):
                request._wakes.discard(wake)

    def _heard(self, number: int, wake: Callable[[], object]) -> tuple[list[Piece], bool]:
        """What has come; then wake() is called for what comes next."""
        request = self._requests[number]
        request._require_engine()
        request._wakes.add(wake)  # before it is looked: nothing may come between
        pieces, end = request._said_by_now()
        if end is None:
            return pieces, False
        request._wakes.discard(wake)
        request._put(end)  # for others who iterate
        if end.error is not None:
            raise end.error
        return pieces, True

    def _wake(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._has_news, number)

    def _has_news(self, number: int) -> None:
        self._came.append(number)
        self._news.set()

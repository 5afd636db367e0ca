"""Several requests that one task of an event loop listens to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from pykvgraph.engine.request import Request
from pykvgraph.engine.types import PromptProgress
from pykvgraph.types import Piece

_AT_A_TIME = 64  # requests, until other tasks of the loop have their turn


class RequestListener:
    """Hears requests of engines that take their steps in threads of their own.

    A task for each request would do the same, but for thousands of them the event loop stands still while
    their tasks begin and end. hears_progress: it hears how far their prompts are, too.
    """

    def __init__(self, requests: Iterable[Request], *, hears_progress: bool = False) -> None:
        self._hears_progress = hears_progress
        self._requests: list[Request] = []
        self._wakes: list[Callable[[], object]] = []
        self._came: deque[int] = deque()  # of whom there may be news
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._left: set[int] = set()  # who has not ended, as far as was told
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """It is heard, too; while bunches() is under way before the last of the others has been told."""
        number = len(self._requests)
        self._requests.append(request)
        request._wakes_on_progress |= self._hears_progress
        self._wakes.append(functools.partial(self._wake, number))
        self._left.add(number)
        self._has_news(number)

    async def bunches(self) -> AsyncIterator[tuple[int, list[Piece] | PromptProgress]]:
        """The number of a request, with what it has said by now; with an empty list when it has ended.

        Or with how far its prompt is, before it says anything.
        Requests are numbered as they were added, from 0 on. Raises what ended one of them.
        """
        n_heard = 0
        try:
            while self._left:
                if not self._came:
                    self._news.clear()
                    await self._news.wait()
                number = self._came.popleft()
                if number not in self._left:  # it woke the loop once more while its end was being read
                    continue
                pieces, has_ended = self._heard(number)
                for progress in self._progress_of(number):
                    yield number, progress
                if pieces:
                    yield number, pieces
                if has_ended:
                    yield number, []
                    self._left.remove(number)
                n_heard += 1
                if n_heard % _AT_A_TIME == 0:
                    await asyncio.sleep(0)
        finally:
            for request, wake in zip(self._requests, self._wakes, strict=True):
                request._wakes.discard(wake)

    def _progress_of(self, number: int) -> list[PromptProgress]:
        """Looked for behind the pieces: what was told before them is there."""
        told = self._requests[number]._progress
        return [told.popleft() for _ in range(len(told))] if self._hears_progress else []

    def _heard(self, number: int) -> tuple[list[Piece], bool]:
        """What has come, and whether it has ended; else it wakes the loop when more comes."""
        request, wake = self._requests[number], self._wakes[number]
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

    def _wake(self, number: int) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._has_news, number)

    def _has_news(self, number: int) -> None:
        self._came.append(number)
        self._news.set()

"""A request, as its caller sees it: pieces as they are said, the completion at the end, cancel()."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.types import Completion, PromptProgress
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.types import Piece


class _End(NamedTuple):
    """Follows the last piece."""

    error: BaseException | None


class Request:
    """What Engine.submit() returns. Iterate over it, in a thread or with `async for`, or wait for result().

    Each Piece comes once, to whoever iterates first. Of several samples (SamplingParams.n), Piece.seq is the
    number of the sample, from 0 on, and pieces of all of them come as they are said.
    """

    def __init__(
        self, n: int, cancel: Callable[[Request], None], step: Callable[[], bool] | None = None
    ) -> None:
        """step: takes a step of the engine, where nobody else does; returns whether more is to do."""
        self._cancel = cancel
        self._step = step
        self._said: queue.SimpleQueue[Piece | _End] = queue.SimpleQueue()
        self._done = threading.Event()
        self._completions: list[Completion | None] = [None] * n
        self._n_left = n
        self._error: BaseException | None = None
        self._wakes: set[Callable[[], object]] = set()  # of event loops that wait for a piece
        self._progress: deque[PromptProgress] = deque()  # what was told of the prompt, and nobody has heard
        self._wakes_on_progress = False
        self._pid = os.getpid()
        self._sequences: Sequence[RequestSequence] = ()  # its samples, until it has ended

    def __iter__(self) -> Iterator[Piece]:
        """The pieces, as they come. Raises what ended the request, if it failed."""
        while isinstance(said := self._next(), Piece):
            yield said
        self._put(said)  # for others who iterate
        if said.error is not None:
            raise said.error

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """As iteration in a thread, without one: the event loop goes on meanwhile."""
        async for pieces in self.bunches():
            for piece in pieces:
                yield piece

    async def bunches(self) -> AsyncIterator[list[Piece]]:
        """As `async for`, but all pieces that have come by now at a time; never an empty list."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(news.set)

        try:
            while True:
                news.clear()
                self._require_engine()
                self._wakes.add(wake)  # taken by the first piece that comes: the others needn't wake the loop
                pieces, end = self._said_by_now()
                if not pieces and end is None:
                    await (news.wait() if self._step is None else loop.run_in_executor(None, self._advance))
                    continue
                self._wakes.discard(wake)
                if pieces:
                    yield pieces
                if end is not None:
                    self._put(end)  # for others who iterate
                    if end.error is not None:
                        raise end.error
                    return
        finally:
            self._wakes.discard(wake)

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end, and returns the completion; of several samples the first.

        timeout: seconds. Raises TimeoutError, what ended the request, if it failed, and InvalidArgumentError
        in a forked process for a request of its parent that had not ended, and without background for one
        that is parked.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Completion]:
        """As result(), of every sample."""
        self._require_engine()
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._step is not None and not self.done and time.monotonic() < end:
            self._advance()
        if not self._done.wait(timeout if self._step is None else 0):
            raise TimeoutError(f"the request has not ended within {timeout} seconds")
        if self._error is not None:
            raise self._error
        return [each for each in self._completions if each is not None]

    @property
    def done(self) -> bool:
        """Whether it has ended, by itself, by an error, or by cancel()."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Ends it after the step that is under way; its completion says "cancelled". An ended one stays."""
        self._cancel(self)

    def _said_by_now(self) -> tuple[list[Piece], _End | None]:
        pieces: list[Piece] = []
        while True:
            try:
                said = self._said.get_nowait()
            except queue.Empty:
                return pieces, None
            if isinstance(said, _End):
                return pieces, said
            pieces.append(said)

    def _require_engine(self) -> None:
        """In a forked process the engine's thread is missing."""
        if self._step is None and not self.done and os.getpid() != self._pid:
            raise InvalidArgumentError(
                "the request is one of the process that was forked: make a new engine in this one"
            )

    def _next(self) -> Piece | _End:
        self._require_engine()
        while self._step is not None and self._said.empty():
            self._advance()
        return self._said.get()

    def _advance(self) -> None:
        """Takes a step, where nobody else does."""
        if self._step is not None and not self._step() and not self.done:
            raise InvalidArgumentError(
                "the request is parked, and nobody else lets it go on: call engine.resume(request) first"
            )

    def _say(self, piece: Piece) -> None:
        self._put(piece)

    def _report(self, progress: PromptProgress) -> None:
        self._progress.append(progress)
        if self._wakes_on_progress:
            self._wake()

    def _complete(self, sample: int, completion: Completion) -> None:
        self._completions[sample] = completion
        self._n_left -= 1
        if not self._n_left and not self.done:
            self._end(None)

    def _fail(self, error: BaseException) -> None:
        if not self.done:
            self._error = error
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._sequences = ()
        self._done.set()
        self._put(_End(error))

    def _put(self, said: Piece | _End) -> None:
        self._said.put(said)
        self._wake()

    def _wake(self) -> None:
        while self._wakes:
            with contextlib.suppress(KeyError):  # whoever listens may stop at any moment
                self._wakes.pop()()

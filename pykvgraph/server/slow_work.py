"""Threads for what takes a while before an answer begins: large bodies, templates, texts to tokens."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from pykvgraph._native.abandoned import AbandonedError, Wanted, begin
from pykvgraph.server.http.reply import unless_gone

R = TypeVar("R")

_log = logging.getLogger("pykvgraph.server")
_VERY_LARGE = 1 << 16  # bytes of a body
_NICENESS = 10  # of the threads: steps of the engine come first


class SlowWork:
    """Runs work in threads of its own, first come, first served; very large bodies have one of them at most.

    A body that is read wants the interpreter all the time, as the engine's thread does: the more are read at
    a time, the longer its steps take. The threads have a low priority.

    What a client wanted who leaves isn't begun, and ends where it looks whether it is wanted.
    """

    def __init__(self) -> None:
        n_threads = min(32, (os.cpu_count() or 1) + 1)
        self._threads = ThreadPoolExecutor(n_threads, "slow", _stand_back)
        self._for_very_large = asyncio.Semaphore(1)
        self._wanted: set[Wanted] = set()

    async def run(self, work: Callable[[], R], size: int, receive: Receive) -> R:
        """What work() returns or raises. size: bytes of the body. receive: tells when the client leaves.

        Raises ClientDisconnect when the client left before the work had a result.
        """
        wanted = Wanted()
        self._wanted.add(wanted)
        running = asyncio.ensure_future(self._run(work, size > _VERY_LARGE, wanted))
        try:
            await unless_gone(running, receive)
        finally:
            self._wanted.discard(wanted)
            if not running.done():
                wanted.abandon()
                running.cancel()
        try:
            return await running
        except (AbandonedError, asyncio.CancelledError):
            raise ClientDisconnect from None

    async def _run(self, work: Callable[[], R], is_very_large: bool, wanted: Wanted) -> R:
        context = contextvars.copy_context()
        context.run(begin, wanted)
        async with self._for_very_large if is_very_large else contextlib.nullcontext():
            job = self._threads.submit(context.run, _without_values, work)
            done = asyncio.wrap_future(job)
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                if job.cancel():
                    raise
                # it has begun: whoever asked gets what it made, so that it can be undone
                return await done

    def later(self, work: Callable[[], object]) -> None:
        """Calls work() when a thread is free; nobody waits for it."""
        with contextlib.suppress(RuntimeError):  # the server ends
            self._threads.submit(_told, work)

    async def between_very_large(self, do: Callable[[], object]) -> None:
        """Calls do() while no very large body is read."""
        async with self._for_very_large:
            do()

    def close(self) -> None:
        """Nothing is begun any more, and what runs ends where it looks whether it is wanted."""
        for wanted in tuple(self._wanted):
            wanted.abandon()
        self._threads.shutdown(wait=False, cancel_futures=True)


def forget_values(error: BaseException | None) -> None:
    """The frames that an exception names keep no values any more.

    Who keeps an exception in one of these frames keeps a circle, which only Python's collector finds: a body
    of a million arrays, while it looks at all of which nobody runs for seconds.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _without_values(work: Callable[[], R]) -> R:
    """As work(); an exception keeps no values of its frames."""
    try:
        return work()
    except BaseException as error:
        forget_values(error)
        raise


def _told(work: Callable[[], object]) -> None:
    """As work(); nobody would hear of its exception."""
    try:
        work()
    except Exception:
        _log.exception("what was to be done later has failed")


def _stand_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

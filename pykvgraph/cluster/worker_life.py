"""One life of a worker: what it reads at the moment, as it says itself, and how it has ended."""

from __future__ import annotations

import asyncio
import contextlib

_NOTICE = 1.0  # seconds in which it is seen that a worker has ended


class WorkerLife:
    """From the moment when a worker can be asked until its end.

    A worker that hangs or crashes is likely to do so while it reads a request: its body, its prompts, its
    grammar. What it has read goes to the engine, which decodes it with others.
    """

    def __init__(self) -> None:
        self._reading: set[str] = set()
        self._over = asyncio.Event()
        self._fault = ""

    def begins(self, request: str) -> None:
        """It reads this request now."""
        self._reading.add(request)

    def has_read(self, request: str) -> None:
        """It has read it."""
        self._reading.discard(request)

    def reads(self, request: str) -> bool:
        """Whether it reads this one now, or did so in the end."""
        return request in self._reading

    def end(self, fault: str = "") -> None:
        """It is over. fault: what it did; "": others have ended it."""
        self._fault = fault
        self._over.set()

    async def ended_by(self, request: str) -> str:
        """What the worker did while it read this request, at its end; "": nothing, or not this one.

        Waits for a moment for that end.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), _NOTICE)
        return self._fault if self.reads(request) else ""

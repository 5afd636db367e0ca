"""Connections whose clients send no more: those of them that are gone are noticed."""

from __future__ import annotations

import asyncio
import os
import select


class HalfClosed:
    """Watches connections after their end of input. In the event loop's thread.

    A client that has closed its connection and one that only sends no more look alike until something is sent
    to them: the first one's system answers with a reset. Nobody reads any more, so that the event loop
    doesn't tell of that.
    """

    def __init__(self) -> None:
        self._epoll: select.epoll | None = None
        self._watched: dict[int, asyncio.Transport] = {}  # by descriptors of our own

    def watch(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> int:
        """Aborts the transport when its connection is reset. The number is for forget().

        Raises OSError when there are too many open files, or connections that are watched.
        """
        if self._epoll is None:
            self._epoll = select.epoll()
            loop.add_reader(self._epoll.fileno(), self._abort)
        # a descriptor that the transport closes could be another connection's when forget() is called
        number = os.dup(transport.get_extra_info("socket").fileno())
        try:
            self._epoll.register(number, select.EPOLLONESHOT)  # an error or a hang-up, told once
        except OSError:
            os.close(number)
            raise
        self._watched[number] = transport
        return number

    def forget(self, number: int) -> None:
        """The connection is lost."""
        assert self._epoll is not None
        self._epoll.unregister(number)
        os.close(number)
        del self._watched[number]

    def _abort(self) -> None:
        assert self._epoll is not None
        for number, _ in self._epoll.poll(0):
            self._watched[number].abort()

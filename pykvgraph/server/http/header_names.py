"""Names of headers as servers commonly write them, `Content-Type`: uvicorn writes small letters.

HTTP takes both for the same. Scripts that look for a name in what curl shows don't.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_NAME = re.compile(rb"(?<=\r\n)[^:\r\n]+(?=:)")
_INFORMATION = b"HTTP/1.1 1"  # heads before the one of the answer, such as 100 Continue


def capitalize_names(cycle: RequestResponseCycle) -> None:
    """Of the head of the answer that this cycle, one request of a connection, is going to write."""
    cycle.transport = _HeadWriter(cycle)  # type: ignore[assignment]


class _HeadWriter:
    """In place of a cycle's transport, until the head is written."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport: asyncio.Transport = cycle.transport

    def write(self, data: bytes) -> None:
        """A whole head, without a byte of the body: uvicorn writes it so."""
        if not data.startswith(_INFORMATION):
            self._cycle.transport = self._transport
        self._transport.write(_NAME.sub(lambda name: name[0].title(), data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""The body of a request, within its limits."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from pykvgraph.server.errors import INVALID, WireError

SHORT = 1 << 16  # bytes, at most, of a body that the event loop reads itself


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """All of it. Raises WireError for one that is too long or takes too long, and ClientDisconnect.

    The head of a request that is too long is enough.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_long(most)
    try:
        return await asyncio.wait_for(_read(request, most), seconds)
    except asyncio.TimeoutError:
        raise WireError(408, INVALID, f"the body did not come within {seconds:g} seconds") from None


async def _read(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_long(most)
        parts.append(part)
    return b"".join(parts)


def _too_long(most: int) -> WireError:
    return WireError(413, INVALID, f"the body has over {most} bytes")

"""The body of a request, within its limits."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from pykvgraph.server.errors import INVALID, WireError


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """All of it. Raises WireError for one that is too long or takes too long, and ClientDisconnect."""
    try:
        return await asyncio.wait_for(_read(request, most), seconds)
    except asyncio.TimeoutError:
        raise WireError(408, INVALID, f"the body did not come within {seconds:g} seconds") from None


async def _read(request: Request, most: int) -> bytes:
    """Reads on up to twice the limit, and drops that: a client that still sends does not read the answer."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > 2 * most:
            break
        if size <= most:
            parts.append(part)
    if size > most:
        raise WireError(413, INVALID, f"the body has over {most} bytes")
    return b"".join(parts)

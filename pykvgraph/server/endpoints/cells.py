"""GET /cells: who has the cells of the cache, and who is answered, for the page at /."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.openai.errors import unsupported
from pykvgraph.server.service import Service


async def cells(service: Service, request: Request) -> ASGIApp:
    """Who has the cells, and who is answered."""
    if not service.settings.slots:
        raise unsupported("This server does not tell who is answered. Start it with `--slots`")
    return await service.looks.told()

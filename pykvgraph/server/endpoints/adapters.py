"""/lora-adapters: the server's LoRA adapters and their scales."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.checks import shown
from pykvgraph.openai.errors import invalid
from pykvgraph.openai.wire_json import loads
from pykvgraph.server.http.body import SHORT, read_body
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.service import Service


async def told(service: Service, request: Request) -> ASGIApp:
    """GET /lora-adapters."""
    return JsonReply(service.adapters.told())


async def set_scales(service: Service, request: Request) -> ASGIApp:
    """POST /lora-adapters: for requests from now on that say nothing of adapters themselves."""
    settings = service.settings
    entries = loads(await read_body(request, min(settings.max_body, SHORT), settings.body_seconds))
    if not isinstance(entries, list):
        raise invalid(f"Request body must be an array, got {shown(entries)}")
    service.adapters.scales = service.adapters.scales_of(entries)
    return JsonReply({"success": True})

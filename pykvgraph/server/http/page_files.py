"""The page at /: files of the package, which ask nobody but this server."""

from __future__ import annotations

from importlib import resources
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pykvgraph.server.service import Service

FILES = {
    "/": "index.html",
    "/index.html": "index.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/icon.svg": "icon.svg",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(service: Service, request: Request) -> ASGIApp:
    """One of its files."""
    name = FILES[request.url.path]
    data = (resources.files("pykvgraph.server") / "page" / name).read_bytes()
    return Response(data, headers=_HEADERS, media_type=_TYPES[PurePath(name).suffix])

"""API keys: who may ask."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pykvgraph.openai.errors import WireError, error_body
from pykvgraph.server.http import page_files
from pykvgraph.server.http.asker import COPY_TO_HEADER, READS_HEADER, TELLS_HEADER, Asker
from pykvgraph.server.http.reply import JsonReply

PUBLIC = frozenset((*page_files.FILES, "/health", "/v1/health", "/models", "/v1/models"))
_PUBLIC_FOLDER = "/v1/models/"
RUN_HEADER = "x-kvgraph-run"
_KEY_OF_SCOPE = "kvgraph.key"
SAID_OF_SCOPE = "kvgraph.said"
OF_RUN = "kvgraph.run"  # of a scope: the router has sent it
_UNKNOWN = WireError(401, "authentication_error", "Invalid API Key")


class Keys:
    """Lets requests through that bring one of the keys, by `Authorization: Bearer` or `X-Api-Key`.

    The key is in the scope then. Keys are compared in constant time. Without keys everybody may ask.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        if scope["type"] == "http" and self._keys:
            given = _given(scope)
            # every key is compared, so that the time tells nothing of which one it was
            found = [key for key in self._keys if hmac.compare_digest(key, given)]
            if found:
                scope[_KEY_OF_SCOPE] = found[0]
            elif scope["path"] not in PUBLIC and not scope["path"].startswith(_PUBLIC_FOLDER):
                await JsonReply(error_body(scope["path"], _UNKNOWN), _UNKNOWN.code)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class OfRun:
    """Lets requests through that bring the token of this run: a worker answers its router alone."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        given = dict(scope["headers"]).get(RUN_HEADER.encode(), b"")
        if hmac.compare_digest(given, self._token):
            scope[OF_RUN] = True
            await self._app(scope, receive, send)
        else:
            await JsonReply.of_error(_UNKNOWN)(scope, receive, send)


def key_of(request: Request) -> bytes:
    """The key that a request came with; b"": the server has no keys."""
    key: bytes = request.scope.get(_KEY_OF_SCOPE, b"")
    return key


def asker_of(request: Request) -> Asker:
    """Who sent this, as a router may have said in the headers; what anybody else says there is ignored."""
    if OF_RUN not in request.scope:
        return Asker(key_of(request))
    headers = request.headers
    return Asker(
        key_of(request),
        headers.get(COPY_TO_HEADER, ""),
        READS_HEADER in headers,
        TELLS_HEADER in headers,
        request.scope.get(SAID_OF_SCOPE, ()),
    )


def _given(scope: Scope) -> bytes:
    headers = dict(scope["headers"])
    bearer: bytes = headers.get(b"authorization", b"")
    scheme, _, key_of_bearer = bearer.partition(b" ")
    if scheme.lower() == b"bearer":  # whatever its case, and with any number of spaces: RFC 9110, 11
        return key_of_bearer.strip(b" ")
    key: bytes = headers.get(b"x-api-key", b"")
    return key

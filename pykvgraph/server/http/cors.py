"""CORS: pages of other origins may ask, as llama-server lets them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PREFLIGHT = [
    (b"access-control-allow-credentials", b"true"),
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
    (b"content-length", b"0"),
]


class Cors:
    """Allows the origin that asks, and answers OPTIONS itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = dict(scope["headers"]).get(b"origin", b"")
        allowed = (b"access-control-allow-origin", origin)
        if scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 200, "headers": [allowed, *_PREFLIGHT]})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start" and origin:
                message["headers"] = [*message["headers"], allowed]
            await send(message)

        await self._app(scope, receive, send_allowed)

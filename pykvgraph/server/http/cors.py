"""CORS: which pages of other origins may ask (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALL = "*"
LOCAL = "localhost"
_HERE = ("localhost", "127.0.0.1", "::1")
_VARIES = (b"vary", b"Origin")  # for caches: another origin gets another answer
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-max-age", b"600"),  # seconds that a browser needn't ask again
    (b"content-length", b"0"),
]


class Cors:
    """Lets pages of these origins ask, and answers OPTIONS itself.

    origins: ALL; LOCAL for pages of this machine; or some origins with commas between them.
    """

    def __init__(self, app: ASGIApp, origins: str) -> None:
        self._app = app
        self._origins = {origin.strip().encode() for origin in origins.split(",")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = dict(scope["headers"])
        allowed = self._allowed(asked.get(b"origin", b""))
        if scope["method"] == "OPTIONS":
            # by name: "*" stands for no Authorization
            names = asked.get(b"access-control-request-headers", b"") or b"*"
            headers = [*allowed, *_PREFLIGHT, (b"access-control-allow-headers", names)]
            if len(allowed) > 1 and asked.get(b"access-control-request-private-network") == b"true":
                headers.append((b"access-control-allow-private-network", b"true"))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *allowed]
            await send(message)

        await self._app(scope, receive, send_allowed)

    def _allowed(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        if not origin or not (
            ALL.encode() in self._origins or origin in self._origins or self._is_here(origin)
        ):
            return [_VARIES]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-credentials", b"true"),
            _VARIES,
        ]

    def _is_here(self, origin: bytes) -> bool:
        if LOCAL.encode() not in self._origins:
            return False
        try:
            return urlsplit(origin.decode("latin-1")).hostname in _HERE
        except ValueError:
            return False

"""CORS, as a browser asks before a page's request, and as it reads the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pykvgraph.server.http.cors import Cors


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b"said"})


def ask(origins: str, method: str, **headers: str) -> dict[str, str]:
    """The headers of the answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "headers": given}
    asyncio.run(Cors(inner, origins)(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 200
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_before_a_request() -> None:
    """A browser takes "*" for no Authorization."""
    names = {"access_control_request_headers": "authorization,content-type"}
    told = ask("*", "OPTIONS", origin="https://a.example", **names)
    assert told["access-control-allow-origin"] == "https://a.example"
    assert told["access-control-allow-headers"] == "authorization,content-type"
    assert told["access-control-allow-credentials"] == "true"
    assert "POST" in told["access-control-allow-methods"] and told["vary"] == "Origin"
    assert ask("*", "OPTIONS", origin="https://a.example")["access-control-allow-headers"] == "*"


def test_a_page_of_the_internet_asks_a_server_at_home() -> None:
    told = ask("*", "OPTIONS", origin="https://a.example", access_control_request_private_network="true")
    assert told["access-control-allow-private-network"] == "true"


def test_the_answer() -> None:
    told = ask("*", "POST", origin="https://a.example")
    assert told["access-control-allow-origin"] == "https://a.example"
    assert told["access-control-allow-credentials"] == "true" and told["x-own"] == "1"
    assert ask("*", "POST") == {"x-own": "1", "vary": "Origin"}


@pytest.mark.parametrize(
    ("origins", "origin", "may"),
    [
        ("localhost", "http://localhost", True),
        ("localhost", "http://localhost:8080", True),
        ("localhost", "http://127.0.0.1:3000", True),
        ("localhost", "http://[::1]:3000", True),
        ("localhost", "http://notlocalhost", False),
        ("localhost", "http://localhost.evil.com", False),
        ("localhost", "http://[::1", False),
        ("localhost", "null", False),
        ("https://a.example, http://b.example:81", "http://b.example:81", True),
        ("https://a.example", "http://a.example", False),
        ("https://a.example,localhost", "http://localhost:1", True),
    ],
)
def test_who_may_ask(origins: str, origin: str, may: bool) -> None:
    for method in ("OPTIONS", "POST"):
        assert ("access-control-allow-origin" in ask(origins, method, origin=origin)) == may

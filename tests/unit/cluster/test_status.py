"""`pykvgraph cluster status`, of whatever may answer it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from pykvgraph.cli import main

WORKER: dict[str, Any] = {
    "worker": 0,
    "role": "answers",
    "state": "ready",
    "where": "process 4711",
    "restarts": 2,
    "slots": 4,
    "requests": 3,
}
COUNTS = {
    "prompt_tokens": 101,
    "prompt_tokens_cached": 202,
    "tier_loaded_tokens": 303,
    "tokens_predicted": 404,
    "cells_used": 505,
    "cells_total": 4096,
}


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that says this to everybody; its address, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def status_of(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["cluster", "status", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_a_table() -> None:
    """Within 80 columns, and a worker without numbers beside one that has them."""
    workers = [
        WORKER | COUNTS,
        WORKER | {"worker": 1, "state": "drains", "requests": 1},
        WORKER | {"worker": 2, "role": "reads", "where": "process 1 at \033[2J"},
    ]
    with answering(200, json.dumps(workers).encode()) as (url, asked):
        code, output = status_of(f"{url}/", "--api-key", "secret,other")
    assert code == 0 and asked == ["/workers Bearer secret"]
    rows = [line.split() for line in output.splitlines()]
    assert rows[1] == ["0", "answers", "3/4", "101", "202", "303", "404", "505/4096", "2", "4711"]
    assert rows[2] == ["1", "drains", "1/4", "2", "4711"]
    assert rows[3][:3] == ["2", "reads", "3/4"]
    assert "\033" not in output and max(map(len, output.splitlines())) <= 80


def test_json() -> None:
    with answering(200, json.dumps([WORKER]).encode()) as (url, asked):
        code, output = status_of(url, "--json")
    assert code == 0 and asked == ["/workers None"]
    assert json.loads(output) == {"workers": [WORKER]}


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"", "--workers"),
        (401, b"", "--api-key"),
        (500, b"", "500"),
        (302, b"", "302"),
        (200, b"no JSON", "no pykvgraph serve --workers"),
        (200, b"\xff\xfe", "no pykvgraph serve --workers"),
        (200, b"[" * 100_000, "no pykvgraph serve --workers"),
        (200, b'{"status": "ok"}', "no pykvgraph serve --workers"),
        (200, json.dumps([{**WORKER, "requests": None}]).encode(), "no pykvgraph serve --workers"),
        (200, json.dumps([{**WORKER, "where": 7}]).encode(), "no pykvgraph serve --workers"),
        (200, json.dumps([{**WORKER, "cells_total": 7}]).encode(), "no pykvgraph serve --workers"),
    ],
)
def test_other_servers(status: int, body: bytes, says: str) -> None:
    with answering(status, body) as (url, asked):
        code, output = status_of(url)
    assert len(asked) == 1
    assert code == 1 and output.startswith("Error: ") and says in output


@pytest.mark.parametrize(
    "url", ["nonsense", "file:///etc/passwd", "http://[::1", "http://127.0.0.1:99999", "http://a b/"]
)
def test_no_address(url: str) -> None:
    code, output = status_of(url)
    assert code == 1 and output.startswith("Error: ")


def test_nobody_answers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        code, output = status_of(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert code == 1 and "no server answers" in output


def test_one_address() -> None:
    assert status_of("http://a", "http://b")[0] == 2

"""Hugging Face's interface on loopback, as far as huggingface_hub asks it for models, and plain files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

HF_VARIABLES = ("HF_", "HUGGING", "TRANSFORMERS_", "XDG_", "http_proxy", "https_proxy", "all_proxy")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Behaviour:
    """How the server answers for one path, or for one repository."""

    status: int = 0  # in place of an answer
    error_code: str = ""  # X-Error-Code, beside a status
    token: str = ""  # what must be sent
    cuts: list[int] = field(default_factory=list)  # the next bodies end, unannounced, after so many bytes
    body: bytes | None = None  # what GET sends in place of the file that HEAD and the list describe
    etag: str | None = None  # None: the SHA-256; "": no header
    ranges: bool = True
    length: bool = True  # whether a plain file has a Content-Length
    location: str = ""  # a redirect


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case


class HubServer(ThreadingHTTPServer):
    """`repos`: name -> files; `files`: path -> content; `behaviour`: repository or path -> Behaviour.

    `older`: name and a commit of it -> the files of then.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.older: dict[tuple[str, str], dict[str, bytes]] = {}
        self.files: dict[str, bytes] = {}
        self.behaviour: dict[str, Behaviour] = {}
        self.requests: list[Request] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


def environment(server: HubServer, home: Path, **more: str) -> dict[str, str]:
    """The environment of a process that knows this server, and keeps what it downloads in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(HF_VARIABLES)}
    folders = {"HF_HOME": str(home), "XDG_CACHE_HOME": str(home)}
    return {**kept, **folders, "HF_ENDPOINT": server.url, "no_proxy": "127.0.0.1", **more}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing goes to stderr."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # some versions ask for it, at times
            self._refuse(404, "")
            return
        self.server.requests.append(
            Request(self.command, self.path, {name.lower(): text for name, text in self.headers.items()})
        )
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        resolved = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = listed or resolved
        repo, revision = (found[1], found[2]) if found else (None, None)
        commit = COMMIT if revision in (None, "main") else revision or ""
        repo_files = self.server.older.get((repo or "", commit))
        if commit == COMMIT:
            repo_files = self.server.repos.get(repo or "")
        behaviour = self.server.behaviour.get(path) or self.server.behaviour.get(repo or "") or Behaviour()
        if behaviour.token and self.headers.get("Authorization") != f"Bearer {behaviour.token}":
            self._refuse(401, behaviour.error_code or "RepoNotFound")
        elif behaviour.status:
            self._refuse(behaviour.status, behaviour.error_code)
        elif behaviour.location:
            self.send_response(302)
            self.send_header("Location", behaviour.location)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif repo and repo not in self.server.repos:
            self._refuse(404, "RepoNotFound")
        elif repo and repo_files is None:
            self._refuse(404, "RevisionNotFound")
        elif listed and repo and repo_files is not None:
            self._list(repo, commit, repo_files)
        else:
            content = repo_files.get(resolved[3]) if repo_files and resolved else self.server.files.get(path)
            if content is None:
                self._refuse(404, "EntryNotFound")
            else:
                self._send(content, behaviour, commit)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, repo: str, commit: str, files: dict[str, bytes]) -> None:
        siblings: list[dict[str, Any]] = []
        for name, content in files.items():
            lfs = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 134}
            siblings.append({"rfilename": name, "size": len(content), "blobId": "0" * 40, "lfs": lfs})
        body = json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, content: bytes, behaviour: Behaviour, commit: str) -> None:
        digest = hashlib.sha256(content).hexdigest()
        etag = f'"{digest}"' if behaviour.etag is None else behaviour.etag
        if self.command == "GET" and behaviour.body is not None:
            content = behaviour.body
        if etag and self.headers.get("If-None-Match") == etag:
            self._refuse(304, "")
            return
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and behaviour.ranges else 0
        if start and self.headers.get("If-Range", etag) != etag:
            start = 0
        if start and start >= len(content):
            self._refuse(416, "")
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if etag:
            self.send_header("ETag", etag)
        if behaviour.length:
            self.send_header("Content-Length", str(len(content) - start))
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            end = behaviour.cuts.pop(0) if behaviour.cuts else len(content)
            self.wfile.write(content[start : start + end])

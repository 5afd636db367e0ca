"""GGUF files at an address of the web, kept in a cache folder: resumed, checked, renewed when they change."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

from pykvgraph import env
from pykvgraph.errors import InvalidArgumentError, ModelLoadError

Progress = Callable[[str, int, "int | None"], None]  # the file's name, bytes that are there, bytes in all

TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 20
_MAGIC = b"GGUF"
PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)  # of a split model
# what a connection that fails or breaks raises; HTTPError is a URLError, and is caught before
_BROKEN = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


def download(url: str, progress: Progress = lambda _name, _done, _total: None) -> str:
    """The path of the GGUF file at an http or https address, with all its parts when it is split.

    What is in the cache is asked for again only if it has changed, and used when the server can't say so.
    What was cut off goes on where it ended, also in a later run. Raises InvalidArgumentError for what is no
    such address, FileNotFoundError when nothing is there, ModelLoadError when the server refuses or the file
    doesn't arrive whole.
    """
    addresses = _addresses(url)
    folder = _folder(addresses)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        paths = [_WebFile(address, folder, progress).path() for address in addresses]
    return str(paths[0])


def cached(url: str) -> str:
    """The path of what download() has kept of this address, without asking anybody.

    Raises InvalidArgumentError for what is no such address, and FileNotFoundError when a part isn't there.
    """
    addresses = _addresses(url)
    paths = [_folder(addresses) / _name(address) for address in addresses]
    missing = next(
        (address for address, path in zip(addresses, paths, strict=True) if not path.exists()), None
    )
    if missing is not None:
        raise FileNotFoundError(f"{_shown(missing)} is not in the cache: get it once without --offline")
    return str(paths[0])


def _folder(addresses: list[str]) -> Path:
    """Where the parts of a model are kept."""
    return env.cache_folder() / hashlib.sha256(addresses[0].encode()).hexdigest()[:16]


def _addresses(url: str) -> list[str]:
    """The address of each part."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
        _ = parts.port  # which may be no number
    except ValueError:
        known = False
    if not known or _name(url) in ("", ".", "..") or "\0" in _name(url):
        raise InvalidArgumentError(
            f"{url!r} is no address of a file: expected http or https://HOST/FILE.gguf"
        )
    split = PART.search(parts.path)
    if split is None:
        return [url]
    if int(split[1]) != 1:
        raise InvalidArgumentError(f"{_shown(url)} is part {int(split[1])}: give the address of the first")
    paths = [
        f"{parts.path[: split.start()]}-{part:05}-of-{split[2]}{split[3]}"
        for part in range(1, int(split[2]) + 1)
    ]
    return [parts._replace(path=path).geturl() for path in paths]


def _name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def _shown(url: str) -> str:
    """The address for messages: what follows ? may be a password."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; the next finds the file."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects stay on the web, and what began encrypted stays so."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            raise ModelLoadError(
                f"{_shown(req.full_url)} sends us to {_shown(newurl)}, which is not followed"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _WebFile:
    """One file: NAME when it is whole, NAME.part before; the server's marks of its version beside it."""

    def __init__(self, url: str, folder: Path, progress: Progress) -> None:
        self._url, self._folder, self._progress = url, folder, progress
        self._file = folder / _name(url)
        self._part = folder / f"{self._file.name}.part"

    def path(self) -> Path:
        """Downloads what is missing, for as long as each connection brings some of it."""
        while True:
            before = _size(self._part)
            reason = "the connection was closed"
            try:
                if self._bring():
                    return self._file
            except urllib.error.HTTPError as error:
                error.close()
                if self._file.exists():
                    return self._file
                raise self._refused(error.code) from None
            except _BROKEN as error:
                reason = str(getattr(error, "reason", "") or error or type(error).__name__)
            if self._file.exists():
                return self._file  # the version before
            if _size(self._part) <= before:
                begun = (
                    f" after {_size(self._part)} bytes: run it again to go on" if self._part.exists() else ""
                )
                raise ModelLoadError(f"{_shown(self._url)} can't be downloaded: {reason}{begun}")

    def _bring(self) -> bool:
        """One request. Whether the file is there and current, or is whole now."""
        request, start = self._request()
        opener = urllib.request.build_opener(_Redirects)
        try:
            response = opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.NOT_MODIFIED:
                error.close()
                return True
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                error.close()
                self._part.unlink()
                return self._bring()
            raise
        except UnicodeError as error:  # a host with odd characters
            raise InvalidArgumentError(f"{_shown(self._url)} is no address: {error}") from error
        with response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                start = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                self._part.unlink()
                raise http.client.HTTPException("the server sent another part than was asked for")
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdecimal() else None
            marks = _marks(response.headers)
            if not marks and self._file.exists() and total == _size(self._file):
                return True  # as far as anybody can tell
            self._check_room(total, start)
            _write_marks(self._part, marks)
            self._read(response, start, total)
        if total is not None and _size(self._part) != total:
            return False
        self._check_magic()
        os.replace(_beside(self._part), _beside(self._file))
        os.replace(self._part, self._file)
        return True

    def _request(self) -> tuple[urllib.request.Request, int]:
        """The request, and how many bytes are there already."""
        # urllib takes ASCII only; what is escaped stays
        request = urllib.request.Request(quote(self._url, safe="%/:=&?~#+!$,;'@()*[]"))
        request.add_header("Accept-Encoding", "identity")
        request.add_header("User-Agent", "pykvgraph")
        start, marks = _size(self._part), _read_marks(self._part)
        etag = marks.get("ETag", "")
        mark = etag if etag and not etag.startswith("W/") else marks.get("Last-Modified")
        if start and mark:
            request.add_header("Range", f"bytes={start}-")
            request.add_header("If-Range", mark)
            return request, start
        if self._file.exists():
            marks = _read_marks(self._file)
            for header, condition in (("ETag", "If-None-Match"), ("Last-Modified", "If-Modified-Since")):
                if header in marks:
                    request.add_header(condition, marks[header])
        return request, 0

    def _read(self, response: http.client.HTTPResponse, start: int, total: int | None) -> None:
        name, done = self._file.name, start
        with open(self._part, "ab" if start else "wb", buffering=0) as part:
            self._progress(name, done, total)
            while chunk := response.read1(_CHUNK):
                try:
                    part.write(chunk)
                except OSError as error:
                    raise ModelLoadError(f"{self._part} can't be written: {error.strerror}") from error
                if done < len(_MAGIC) <= done + len(chunk):
                    self._check_magic()  # before the rest of what may be a page of HTML
                done += len(chunk)
                self._progress(name, done, total)

    def _check_magic(self) -> None:
        with open(self._part, "rb") as part:
            head = part.read(len(_MAGIC))
        if head != _MAGIC:
            self._part.unlink()
            raise ModelLoadError(f"{_shown(self._url)} is no GGUF file: it begins with {head!r}")

    def _check_room(self, total: int | None, start: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if total is not None and total - start > free:
            raise ModelLoadError(
                f"{_shown(self._url)} needs {total - start} bytes in {self._folder}, where {free} are free: "
                "make room, or set XDG_CACHE_HOME"
            )

    def _refused(self, status: int) -> Exception:
        if status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.GONE):
            return FileNotFoundError(f"{_shown(self._url)} is not there (status {status})")
        return ModelLoadError(
            f"{_shown(self._url)} can't be downloaded: the server answers with status {status}"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _marks(headers: Message) -> dict[str, str]:
    """What tells one version of a file from the next."""
    return {name: headers[name] for name in ("ETag", "Last-Modified") if headers.get(name)}


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _write_marks(path: Path, marks: dict[str, str]) -> None:
    _beside(path).write_text(json.dumps(marks))


def _read_marks(path: Path) -> dict[str, str]:
    try:
        marks = json.loads(_beside(path).read_text())
    except (OSError, ValueError):
        return {}
    return {name: text for name, text in marks.items() if isinstance(text, str)}

"""Files of the web, from a server on loopback."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.hub_server import Behaviour, HubServer, hub_server

from pykvgraph.download import web_file
from pykvgraph.errors import InvalidArgumentError, ModelLoadError

CONTENT = b"GGUF" + bytes(range(256)) * 40
NEWER = b"GGUF" + bytes(range(255, -1, -1)) * 50


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with hub_server() as server:
        server.files["/a/model.gguf"] = CONTENT
        yield server


def downloads(cache: Path) -> dict[str, bytes]:
    """The files in the cache, but for what is kept beside them."""
    return {path.name: path.read_bytes() for path in cache.rglob("*.gguf*") if path.suffix != ".json"}


def test_a_file_is_downloaded_once(server: HubServer, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    path = Path(
        web_file.download(f"{server.url}/a/model.gguf?download=true", lambda *step: told.append(step))
    )
    assert path.parents[1] == tmp_path / "pykvgraph"
    assert downloads(tmp_path) == {"model.gguf": CONTENT}
    assert (told[0], told[-1]) == (
        ("model.gguf", 0, len(CONTENT)),
        ("model.gguf", len(CONTENT), len(CONTENT)),
    )
    told.clear()
    again = web_file.download(f"{server.url}/a/model.gguf?download=true", lambda *step: told.append(step))
    assert (again, told, len(server.requests)) == (str(path), [], 2)  # the server was asked, and sent nothing


@pytest.mark.parametrize("etag", [None, ""], ids=["etag", "no etag"])
def test_a_changed_file_is_downloaded_again(server: HubServer, tmp_path: Path, etag: str | None) -> None:
    server.behaviour["/a/model.gguf"] = Behaviour(etag=etag)
    for content in (CONTENT, NEWER):
        server.files["/a/model.gguf"] = content
        web_file.download(f"{server.url}/a/model.gguf")
        assert downloads(tmp_path) == {"model.gguf": content}


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_connection_goes_on(server: HubServer, tmp_path: Path, ranges: bool) -> None:
    server.behaviour["/a/model.gguf"] = Behaviour(cuts=[3000, 4000], ranges=ranges)
    web_file.download(f"{server.url}/a/model.gguf")
    assert downloads(tmp_path) == {"model.gguf": CONTENT}
    asked = [request.headers.get("range") for request in server.requests]
    assert asked == [None, "bytes=3000-", "bytes=7000-" if ranges else "bytes=4000-"]


def test_a_later_run_goes_on(server: HubServer, tmp_path: Path) -> None:
    server.behaviour["/a/model.gguf"] = Behaviour(cuts=[3000, 0])
    with pytest.raises(
        ModelLoadError, match=r"model.gguf can't be downloaded.* after 3000 bytes: run it again"
    ):
        web_file.download(f"{server.url}/a/model.gguf")
    assert downloads(tmp_path) == {"model.gguf.part": CONTENT[:3000]}
    web_file.download(f"{server.url}/a/model.gguf")
    assert downloads(tmp_path) == {"model.gguf": CONTENT}
    assert server.requests[-1].headers["range"] == "bytes=3000-"


def test_what_changed_in_between_begins_anew(server: HubServer, tmp_path: Path) -> None:
    server.behaviour["/a/model.gguf"] = Behaviour(cuts=[3000, 0])
    with pytest.raises(ModelLoadError):
        web_file.download(f"{server.url}/a/model.gguf")
    server.files["/a/model.gguf"] = NEWER
    web_file.download(f"{server.url}/a/model.gguf")
    assert downloads(tmp_path) == {"model.gguf": NEWER}


def test_more_than_there_is_begins_anew(server: HubServer, tmp_path: Path) -> None:
    server.behaviour["/a/model.gguf"] = Behaviour(cuts=[3000, 0])
    with pytest.raises(ModelLoadError):
        web_file.download(f"{server.url}/a/model.gguf")
    (part,) = tmp_path.rglob("*.part")
    part.write_bytes(bytes(len(CONTENT) + 1))
    web_file.download(f"{server.url}/a/model.gguf")
    assert downloads(tmp_path) == {"model.gguf": CONTENT}


def test_the_cache_serves_when_the_server_does_not(server: HubServer, tmp_path: Path) -> None:
    path = web_file.download(f"{server.url}/a/model.gguf")
    server.behaviour["/a/model.gguf"] = Behaviour(status=503)
    assert web_file.download(f"{server.url}/a/model.gguf") == path
    url = server.url
    server.shutdown()
    server.server_close()
    assert web_file.download(f"{url}/a/model.gguf") == path
    with pytest.raises(ModelLoadError, match=r"other.gguf can't be downloaded: .*refused"):
        web_file.download(f"{url}/a/other.gguf")


def test_a_split_model_lies_together(server: HubServer, tmp_path: Path) -> None:
    names = [f"m-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    server.files.update({f"/s/{name}": CONTENT + name.encode() for name in names})
    path = Path(web_file.download(f"{server.url}/s/{names[0]}?key=x"))
    assert path.name == names[0]
    assert downloads(path.parent) == {name: CONTENT + name.encode() for name in names}
    assert all(request.path.endswith("?key=x") for request in server.requests)
    with pytest.raises(InvalidArgumentError, match=r"part 2: give the address of the first"):
        web_file.download(f"{server.url}/s/{names[1]}")


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (404, FileNotFoundError, "is not there"),
        (403, ModelLoadError, "answers with status 403"),
        (500, ModelLoadError, "answers with status 500"),
    ],
)
def test_what_a_server_refuses(server: HubServer, status: int, error: type[Exception], text: str) -> None:
    server.behaviour["/a/model.gguf"] = Behaviour(status=status)
    with pytest.raises(error, match=text) as caught:
        web_file.download(f"{server.url}/a/model.gguf?token=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("body", [b"<html>please log in</html>", b"GGU", b""])
@pytest.mark.parametrize("length", [True, False])
def test_what_is_no_model_is_not_kept(server: HubServer, tmp_path: Path, body: bytes, length: bool) -> None:
    server.files["/a/page.gguf"] = body
    server.behaviour["/a/page.gguf"] = Behaviour(length=length)
    with pytest.raises(ModelLoadError, match=r"page.gguf is no GGUF file: it begins with b'"):
        web_file.download(f"{server.url}/a/page.gguf")
    assert downloads(tmp_path) == {}


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/model.gguf"])
def test_a_redirect_stays_on_the_web(server: HubServer, location: str) -> None:
    server.behaviour["/moved.gguf"] = Behaviour(location=f"{server.url}/a/model.gguf")
    assert Path(web_file.download(f"{server.url}/moved.gguf")).read_bytes() == CONTENT
    server.behaviour["/away.gguf"] = Behaviour(location=location)
    with pytest.raises(ModelLoadError, match=r"which is not followed|status 302"):
        web_file.download(f"{server.url}/away.gguf")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "model.gguf",
        "file:///etc/passwd",
        "ftp://host/m.gguf",
        "http://",
        "https://host",
        "http://host/",
        "http://host/a/..",
        "http://host/%00.gguf",
        "http://[x/m.gguf",
        "http://host:x/m.gguf",
        "http://a@b/m.gguf",
    ],
)
def test_what_is_no_address(server: HubServer, url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no address of a file"):
        web_file.download(url)


def test_an_odd_name(server: HubServer, tmp_path: Path) -> None:
    server.files["/ä b/mö del.gguf"] = CONTENT
    web_file.download(f"{server.url}/ä b/mö%20del.gguf")
    assert downloads(tmp_path) == {"mö del.gguf": CONTENT}


def test_a_full_disk(server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        with pytest.raises(ModelLoadError, match=rf"needs {len(CONTENT)} bytes .* where 100 are free"):
            web_file.download(f"{server.url}/a/model.gguf")
    real = open

    class Full:
        """A file that nothing can be written to."""

        def __init__(self, file: object) -> None:
            self._file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()  # type: ignore[attr-defined]

        def write(self, _data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        web_file, "open", lambda path, *mode, **more: Full(real(path, *mode, **more)), raising=False
    )
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(ModelLoadError, match=r"model.gguf.part can't be written: No space left"):
        web_file.download(f"{server.url}/a/model.gguf")
    assert "model.gguf" not in downloads(tmp_path)


def test_without_the_network_only_the_cache_counts(server: HubServer) -> None:
    server.files["/a/m-00001-of-00002.gguf"] = server.files["/a/m-00002-of-00002.gguf"] = CONTENT
    for name in ("model.gguf", "m-00001-of-00002.gguf"):
        with pytest.raises(FileNotFoundError, match=r"is not in the cache: get it once without --offline"):
            web_file.cached(f"{server.url}/a/{name}")
        path = web_file.download(f"{server.url}/a/{name}")
        n_requests = len(server.requests)
        assert web_file.cached(f"{server.url}/a/{name}") == path
        assert len(server.requests) == n_requests
    Path(path).with_name("m-00002-of-00002.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="m-00002-of-00002"):
        web_file.cached(f"{server.url}/a/m-00001-of-00002.gguf")
    with pytest.raises(InvalidArgumentError):
        web_file.cached("ftp://a/b.gguf")

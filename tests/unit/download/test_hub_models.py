"""Models of Hugging Face's repositories, by huggingface_hub from a server on loopback."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import HF_VARIABLES, Behaviour, HubServer, environment, hub_server

from pykvgraph.download import hub
from pykvgraph.errors import InvalidArgumentError, ModelLoadError

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

CONTENT = b"GGUF" + bytes(range(256)) * 40
QUANTS = [
    "README.md",
    "m-IQ4_0.gguf",
    "m-Q4_0.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-Q8_0.gguf",
    "m-f16.gguf",
]
BESIDE = ["mmproj-m-Q4_K_M.gguf", "m-imatrix.gguf", "imatrix-Q8_0.gguf", "m.Q4_K_M.gguf.json"]
SPLIT = [f"Q6_K/m-Q6_K-{part:05}-of-00002.gguf" for part in (1, 2)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, Any]]:
    """The server, and a huggingface_hub that knows it: it reads the environment when it is imported."""
    with hub_server() as server, pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(HF_VARIABLES):
                patch.delenv(name)
        for name, value in environment(server, tmp_path_factory.mktemp("home")).items():
            patch.setenv(name, value)
        for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
            patch.delitem(sys.modules, name)
        yield server, importlib.import_module("huggingface_hub.constants")
        for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
            del sys.modules[name]


@pytest.fixture
def server(
    served: tuple[HubServer, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[HubServer]:
    """The server with a repository a/m, and a cache that is empty."""
    server, constants = served
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    server.repos = {"a/m": {name: CONTENT + name.encode() for name in [*QUANTS, *BESIDE, *SPLIT]}}
    server.behaviour.clear()
    server.older.clear()
    server.requests.clear()
    yield server


OLD = "f" * 40


def test_a_commit(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a repository had then, whatever it has now; and without asking, once it is there."""
    server.older["a/m", OLD] = {"m-Q8_0.gguf": CONTENT + b"then"}
    for name in (f"a/m@{OLD}", f"a/m@{OLD}:q8_0", f"a/m@{OLD}:m-Q8_0.gguf"):
        assert Path(hub.download_model(name)).read_bytes() == CONTENT + b"then"
    assert Path(hub.download_model("a/m:Q8_0")).read_bytes() == CONTENT + b"m-Q8_0.gguf"
    assert Path(hub.download_model("a/m@main:Q8_0")).read_bytes() == CONTENT + b"m-Q8_0.gguf"
    with pytest.raises(FileNotFoundError, match=r"a/m@f+ has no model Q4_K_M: m-Q8_0.gguf$"):
        hub.download_model(f"a/m@{OLD}:Q4_K_M")
    with pytest.raises(FileNotFoundError, match="no such revision"):
        hub.download_model("a/m@other")
    with pytest.raises(InvalidArgumentError, match="no repository"):
        hub.download_model("a/m@:Q8_0")
    go_offline(monkeypatch)
    assert Path(hub.download_model(f"a/m@{OLD}")).read_bytes() == CONTENT + b"then"
    assert Path(hub.download_model("a/m:Q8_0")).read_bytes() == CONTENT + b"m-Q8_0.gguf"


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["huggingface_hub.constants"], "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("quant", "name"),
    [
        (None, "m-Q4_K_M.gguf"),
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("Q4_0", "m-Q4_0.gguf"),
        ("F16", "m-f16.gguf"),
        ("m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("Q6_K", SPLIT[0]),
    ],
)
def test_the_choice(quant: str | None, name: str) -> None:
    chosen = hub.choose("a/m", reversed([*QUANTS, *BESIDE, *SPLIT]), quant)
    assert chosen == (SPLIT if quant == "Q6_K" else [name])


def test_the_choice_without_the_usual_ones() -> None:
    assert hub.choose("a/m", ["m-Q8_0.gguf", "m-Q2_K.gguf", *BESIDE], None) == ["m-Q8_0.gguf"]
    assert hub.choose("a/m", ["m-Q5_0.gguf", "m-Q2_K.gguf", *BESIDE], None) == ["m-Q2_K.gguf"]


@pytest.mark.parametrize(
    ("files", "quant", "error", "text"),
    [
        (
            QUANTS,
            "Q4_K",
            FileNotFoundError,
            "a/m has no model Q4_K: m-IQ4_0.gguf, m-Q4_0.gguf, .*m-f16.gguf$",
        ),
        (QUANTS, "x.gguf", FileNotFoundError, "a/m has no model x.gguf: m-IQ4_0.gguf"),
        (BESIDE[:2], None, FileNotFoundError, "a/m has no model in a GGUF file: mmproj-m-Q4_K_M.gguf"),
        ([], None, FileNotFoundError, "a/m has no model in a GGUF file$"),
        (
            ["a-Q8_0.gguf", "b-q8_0.gguf"],
            None,
            InvalidArgumentError,
            "more than one .*: a-Q8_0.gguf, b-q8_0.gg",
        ),
        (SPLIT[1:], None, FileNotFoundError, "a/m has 1 of the 2 parts"),
        ([f"{n}.gguf" for n in range(50)], "Q9", FileNotFoundError, "0.gguf, .* and 30 more$"),
    ],
)
def test_no_choice(files: list[str], quant: str | None, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hub.choose("a/m", files, quant)


def test_a_model_is_downloaded_once(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.download_model("a/m")
    assert Path(path).read_bytes() == server.repos["a/m"]["m-Q4_K_M.gguf"]
    assert [request.method for request in server.requests] == ["GET", "HEAD", "GET"]  # the list, and the file
    monkeypatch.setattr(hub, "_sha256", lambda _: pytest.fail("read again"))  # gigabytes, at each start
    assert hub.download_model("a/m:q4_k_m") == path
    assert [request.method for request in server.requests[3:]] == ["GET", "HEAD"]
    go_offline(monkeypatch)
    assert hub.download_model("a/m") == path
    with pytest.raises(FileNotFoundError, match=r"cache of a/m\) has no model Q8_0: m-Q4_K_M.gguf$"):
        hub.download_model("a/m:Q8_0")
    with pytest.raises(FileNotFoundError, match=r"a/other is not in the cache .* HF_HUB_OFFLINE is set"):
        hub.download_model("a/other")


def test_a_split_model(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Path(hub.download_model("a/m:Q6_K"))
    assert first.as_posix().endswith(SPLIT[0])
    found = {f"Q6_K/{path.name}": path.read_bytes() for path in first.parent.iterdir()}
    assert found == {name: server.repos["a/m"][name] for name in SPLIT}
    go_offline(monkeypatch)
    assert hub.download_model("a/m") == str(first)


def test_a_cut_download_goes_on(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["huggingface_hub.constants"], "DOWNLOAD_CHUNK_SIZE", 1000)  # not 10 MB
    server.behaviour["/a/m/resolve/main/m-Q8_0.gguf"] = Behaviour(cuts=[3000])
    path = Path(hub.download_model("a/m:Q8_0"))
    assert path.read_bytes() == server.repos["a/m"]["m-Q8_0.gguf"]
    assert server.requests[-1].headers["range"] == "bytes=3000-"


def test_what_was_damaged_is_not_kept(server: HubServer, tmp_path: Path) -> None:
    whole = server.repos["a/m"]["m-Q8_0.gguf"]
    server.behaviour["/a/m/resolve/main/m-Q8_0.gguf"] = Behaviour(body=bytes(len(whole)))
    with pytest.raises(ModelLoadError, match=r"a/m/m-Q8_0.gguf was damaged on its way"):
        hub.download_model("a/m:Q8_0")
    server.behaviour["/a/m/resolve/main/m-Q8_0.gguf"] = Behaviour(body=whole[:100])
    with pytest.raises(ModelLoadError, match="should be of size") as caught:
        hub.download_model("a/m:Q8_0")
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.rglob("blobs/*"), *tmp_path.rglob("*.gguf")]
    server.behaviour.clear()
    path = Path(hub.download_model("a/m:Q8_0"))
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(whole).digest()


@pytest.mark.parametrize(
    ("behaviour", "error", "text"),
    [
        (
            Behaviour(status=403, error_code="GatedRepo"),
            ModelLoadError,
            "a/m is gated: accept its terms at http",
        ),
        (
            Behaviour(status=404, error_code="RepoNotFound"),
            FileNotFoundError,
            "has no repository a/m, or it is",
        ),
        (Behaviour(status=401), ModelLoadError, r"refuses access \(status 401\): set HF_TOKEN"),
        (Behaviour(status=403), ModelLoadError, r"refuses access \(status 403\): set HF_TOKEN"),
        (Behaviour(status=500), ModelLoadError, "answers with status 500"),
    ],
)
def test_what_the_hub_refuses(
    server: HubServer, behaviour: Behaviour, error: type[Exception], text: str
) -> None:
    server.behaviour["a/m"] = behaviour
    with pytest.raises(error, match=text) as caught:
        hub.download_model("a/m")
    assert "\n" not in str(caught.value)
    server.behaviour.clear()
    path = hub.download_model("a/m")
    server.behaviour["a/m"] = behaviour
    assert hub.download_model("a/m") == path  # what is in the cache is ours already


def test_no_connection(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = sys.modules["huggingface_hub.constants"]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelLoadError, match=r"a/m: http://127.0.0.1:9 can't be reached: .*refused"):
        hub.download_model("a/m")


def test_a_full_disk(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["huggingface_hub"], "hf_hub_download", full)
    with pytest.raises(ModelLoadError, match="a/m doesn't fit on the disk of"):
        hub.download_model("a/m")


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "https://huggingface.co/a/m", "a/m:", "a b/c", "/m"])
def test_what_is_no_repository(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no repository: expected USER/NAME"):
        hub.download_model(name)


def test_names_that_the_hub_does_not_take(server: HubServer) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a\.\./m") as caught:
        hub.download_model("a../m")
    assert "\n" not in str(caught.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'pykvgraph\[hub\]'"):
        hub.download_model("a/m")

"""Downloads, with a stand-in for huggingface_hub."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pykvgraph.download import hub
from pykvgraph.errors import InvalidArgumentError

FILES = ["README.md", "model-Q4_0.gguf", "model-Q8_0.gguf", "sub/model-00001-of-00002.gguf"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What the hub was asked for."""
    calls: list[Any] = []
    module: Any = ModuleType("huggingface_hub")

    def hf_hub_download(repo_id: str, filename: str, **where: Any) -> str:
        calls.append((repo_id, filename, where))
        return str(tmp_path / filename)

    module.list_repo_files = lambda _repo: FILES
    module.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("model-Q8_0.gguf", "model-Q8_0.gguf"),
        ("*Q4_0.gguf", "model-Q4_0.gguf"),
        ("*00001*", "sub/model-00001-of-00002.gguf"),
        ("not-listed.gguf", "not-listed.gguf"),  # the hub says so itself, and finds it offline
    ],
)
def test_a_pattern_means_one_file(asked: list[Any], tmp_path: Path, pattern: str, name: str) -> None:
    assert hub.download("some/repo", pattern, local_dir="here") == str(tmp_path / name)
    assert asked == [("some/repo", name, {"local_dir": "here", "cache_dir": None})]


def test_more_files(asked: list[Any], tmp_path: Path) -> None:
    assert hub.download("some/repo", "*Q8*", ["*00001*", "README*"]) == str(tmp_path / FILES[2])
    assert [name for _, name, _ in asked] == [FILES[2], FILES[3], FILES[0]]


@pytest.mark.parametrize("pattern", ["*.gguf", "*Q9*", None])
def test_a_pattern_of_none_or_several(asked: list[Any], pattern: str | None) -> None:
    with pytest.raises(InvalidArgumentError, match=r"means [03] files of some/repo.*model-Q4_0"):
        hub.download("some/repo", pattern)
    assert asked == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        hub.download("some/repo", "a.gguf")

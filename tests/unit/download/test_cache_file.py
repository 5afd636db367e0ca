"""Files of the cache directory: whatever is in them, or can't be written, nothing fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvgraph.download.cache_file import recall, remember


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pykvgraph"


def test_what_was_remembered(folder: Path) -> None:
    assert recall("times.json") == {}
    remember("times.json", {"a": [1.5]})
    assert recall("times.json") == {"a": [1.5]}
    assert [path.name for path in folder.iterdir()] == ["times.json"]


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' * 9999])
def test_a_file_of_others(folder: Path, text: bytes) -> None:
    folder.mkdir()
    (folder / "times.json").write_bytes(text)
    assert recall("times.json") == {}


def test_a_huge_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "times.json").write_bytes(b"{" + b" " * (5 << 20) + b"}")
    assert recall("times.json") == {}


def test_what_is_no_file(folder: Path) -> None:
    (folder / "times.json").mkdir(parents=True)
    assert recall("times.json") == {}
    remember("times.json", {"a": 1})
    assert recall("times.json") == {}


def test_a_folder_that_is_none(folder: Path) -> None:
    folder.write_text("a file")
    remember("times.json", {"a": 1})
    assert recall("times.json") == {}

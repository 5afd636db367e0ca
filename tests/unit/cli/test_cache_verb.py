"""`pykvgraph cache`: what is in a directory of prefixes, what is damaged there, and what goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pykvgraph.cli import main
from pykvgraph.prefix import block
from pykvgraph.tiers.disk import DiskTier
from unit.tiers.test_disk import SIZE, name_of, put

HALF = 600_000  # of a MiB, and a little


def run(*arguments: Any, **env: str) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, arguments)], env={"COLUMNS": "100", **env})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three records, used in this order; a file of somebody else, and one that a dead process was writing."""
    folder = tmp_path / "tier"
    disk = DiskTier(folder, 10 * HALF)
    for number, kind in ((1, block.TOKENS), (2, block.TOKENS), (3, block.END)):
        assert put(disk, number, HALF, kind)
        os.utime(path_of(folder, number, kind), (number, number))
    (folder / "notes.txt").write_text("mine")
    (folder / f"{name_of(9).key.hex()}.{'0' * 16}.tmp").write_bytes(b"half")
    return folder


def path_of(folder: Path, number: int, kind: bytes = block.TOKENS) -> Path:
    suffix = ".block" if kind == block.TOKENS else ".end"
    return folder / f"{name_of(number, kind).key.hex()}{suffix}"


def damage(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)


def test_what_was_used_last_comes_first(folder: Path) -> None:
    before = {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}
    found = json.loads(run("ls", "--cache-dir", folder, "--json").stdout)
    files = found.pop("files")
    assert [each["name"] for each in files] == [
        path_of(folder, 3, block.END).name,
        path_of(folder, 2).name,
        path_of(folder, 1).name,
    ]
    assert [(each["n_tokens"], each["used"]) for each in files] == [(5, 3.0), (32, 2.0), (32, 1.0)]
    n_bytes = sum(each["n_bytes"] for each in files)
    assert n_bytes == 3 * (HALF + SIZE - 1000) - 4 * 27  # an end of five tokens is shorter
    assert found == {"folder": str(folder), "n_bytes": n_bytes, "n_removed": 0}
    assert {each.name: each.stat().st_mtime_ns for each in folder.iterdir()} == before
    shown = run(KVGRAPH_CACHE_DIR=str(folder)).stdout
    assert "3 files, 1.7 MiB, 69 tokens" in shown
    assert f"{name_of(2).key.hex()[:16]}….block" in shown


def test_a_damaged_file_is_named_and_stays(folder: Path) -> None:
    assert run("verify", "--cache-dir", folder).exit_code == 0
    damage(path_of(folder, 2))
    path_of(folder, 1).rename(path_of(folder, 4))
    result = run("verify", "--cache-dir", folder, "--json")
    assert result.exit_code == 1
    faults = {each["name"]: each["fault"] for each in json.loads(result.stdout)["files"]}
    assert faults == {
        path_of(folder, 3, block.END).name: None,
        path_of(folder, 2).name: "damaged",
        path_of(folder, 4).name: "other",
    }
    assert "damaged: 2 files" in run("verify", "--cache-dir", folder).stdout
    assert run("ls", "--cache-dir", folder).exit_code == 0


def test_prune_removes_what_is_damaged_and_half_written(folder: Path) -> None:
    damage(path_of(folder, 3, block.END))
    result = run("prune", "--cache-dir", folder)
    assert result.exit_code == 0
    assert "removed: 1 files" in result.stdout
    left = {each.name for each in folder.iterdir()}
    assert left == {"notes.txt", "pykvgraph.lock", path_of(folder, 1).name, path_of(folder, 2).name}


def test_prune_keeps_what_was_used_last(folder: Path) -> None:
    found = json.loads(run("prune", "--cache-dir", folder, "--cache-disk", 1, "--json").stdout)
    assert found["n_removed"] == 2
    assert [each["name"] for each in found["files"]] == [path_of(folder, 3, block.END).name]
    assert (folder / "notes.txt").read_text() == "mine"
    assert json.loads(run("prune", "--cache-dir", folder, "--cache-disk", 0, "--json").stdout)["files"] == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    result = run("ls", "--cache-dir", tmp_path / "none")
    assert result.exit_code == 1
    assert "no directory" in result.stderr
    assert not (tmp_path / "none").exists()


def test_prune_leaves_nothing_in_somebody_elses_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").write_text("mine")
    assert run("prune", "--cache-dir", tmp_path, "--cache-disk", 0).exit_code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["notes.tmp"]

"""Split models with a file missing, damaged, exchanged or renamed: which it is, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.chance import THOROUGH
from support.gguf_bytes import STRING, UINT32
from support.gguf_parts import Parts, take_apart
from support.models import SMALL, write_split
from support.mutations import UINT16

import pykvgraph as kvg

TESTS = Path(__file__).parents[2]
N_MUTANTS = 200 if THOROUGH else 50


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_split(SMALL, tmp_path, 10)


def refused(path: Path) -> str:
    """The same error, whoever opens the file."""
    messages = set()
    for opened in (kvg.GgufFile, lambda path: kvg.Model(path, device="cpu"), kvg.plan_memory):
        with pytest.raises(kvg.ModelLoadError) as info:
            opened(path)
        messages.add(str(info.value))
    assert len(messages) == 1
    return messages.pop()


def change(path: Path, name: str, kind: int, value: int | bytes | None) -> None:
    """Sets a key of a file, or takes it away."""
    parts = take_apart(path.read_bytes())
    parts.keys = [key for key in parts.keys if key.name != name.encode()]
    if value is not None:
        parts.set(name, kind, value)
    parts.raw().write(path)


@pytest.mark.parametrize("index", [1, 2])
def test_a_later_part_alone(files: list[Path], index: int) -> None:
    for other in files:
        if other != files[index]:
            other.unlink()
    message = refused(files[index])
    assert (
        message
        == f"{files[index]} is part {index + 1} of the 3 files of a split model: open the first, {files[0]}"
    )


def test_a_later_part_under_another_name(files: list[Path], tmp_path: Path) -> None:
    path = files[1].rename(tmp_path / "model.gguf")
    assert "open the first, whose name ends in -00001-of-00003.gguf" in refused(path)


def test_the_first_under_another_name(files: list[Path], tmp_path: Path) -> None:
    path = files[0].rename(tmp_path / "model.gguf")
    message = refused(path)
    assert str(path) in message
    assert "must end in '-00001-of-00003.gguf'" in message


@pytest.mark.parametrize("index", [1, 2])
def test_a_missing_part(files: list[Path], index: int) -> None:
    files[index].unlink()
    message = refused(files[0])
    assert message.startswith(f"{files[index]} is missing: it is part {index + 1} of the 3")
    assert "put all of them there" in message


def test_a_missing_first_part(files: list[Path]) -> None:
    files[0].unlink()
    with pytest.raises(FileNotFoundError):
        kvg.Model(files[0])


def test_each_part_is_checked_like_a_whole_file(files: list[Path]) -> None:
    data = files[2].read_bytes()
    for broken, expected in (
        (data[:-1], "truncated"),
        (data[:100], "truncated"),
        (b"", "regular file"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ):
        files[2].write_bytes(broken)
        message = refused(files[0])
        assert str(files[2]) in message
        assert expected in message


def test_parts_in_each_others_place(files: list[Path], tmp_path: Path) -> None:
    files[1].rename(tmp_path / "second")
    files[2].rename(files[1])
    (tmp_path / "second").rename(files[2])
    assert refused(files[0]).startswith(
        f"{files[1]} says that it is part 3 of 3, its name that it is part 2 of 3"
    )


def test_a_whole_model_in_a_parts_place(files: list[Path], tmp_path: Path) -> None:
    change(files[1], "split.count", UINT16, None)
    assert refused(files[0]).startswith(f"{files[1]} says that it is part 1 of 1")


@pytest.mark.parametrize(
    ("name", "kind", "value", "expected"),
    [
        ("split.count", UINT16, 4, "part 2 of 4, its name that it is part 2 of 3"),
        ("split.tensors.count", UINT32, 22, "is of another model than"),
        ("general.architecture", STRING, b"qwen3", "its architecture is 'qwen3', not 'llama'"),
        ("split.no", UINT16, 7, "split.no is 7 and split.count 3"),
        ("split.no", STRING, b"1", "split.no"),
        ("split.no", UINT16, None, "split.no"),
    ],
)
def test_a_part_of_another_model(
    files: list[Path], name: str, kind: int, value: int | bytes | None, expected: str
) -> None:
    change(files[1], name, kind, value)
    message = refused(files[0])
    assert str(files[1]) in message
    assert expected in message


def test_counts_that_do_not_add_up(files: list[Path]) -> None:
    for path in files:
        change(path, "split.tensors.count", UINT32, 22)
    assert "have 21 tensors, expected 22" in refused(files[0])
    change(files[0], "split.tensors.count", UINT32, None)
    assert "'split.tensors.count' is missing" in refused(files[0])


def test_a_tensor_in_two_parts(files: list[Path]) -> None:
    """One of the second's tensors is called as one of the first."""
    models = [take_apart(path.read_bytes()) for path in files]
    models[1].tensors[0].name = models[0].tensors[3].name
    models[1].raw().write(files[1])
    message = refused(files[0])
    assert message.startswith(f"{files[1]}: tensor '{models[0].tensors[3].name.decode()}' is there already")
    assert str(files[0]) in message


@pytest.mark.parametrize("count", [2, 2**16 - 1])
def test_a_whole_model_that_says_it_is_one_of_many(files: list[Path], tmp_path: Path, count: int) -> None:
    change(files[0], "split.count", UINT16, count)
    assert f"-00001-of-{count:05}.gguf" in refused(files[0])


def test_other_weights_of_the_same_shape_are_taken(files: list[Path], tmp_path: Path) -> None:
    """Nothing in the file tells: what can be known of a part is what it says."""
    (tmp_path / "other").mkdir()
    others = write_split(replace(SMALL, seed=1), tmp_path / "other", 10)
    files[1].write_bytes(others[1].read_bytes())
    with kvg.Model(files[0], device="cpu") as model:
        assert model.n_layer == SMALL.n_layer


def test_libllama_is_not_shown_the_other_files(files: list[Path]) -> None:
    """Its getters would end the process at a key of another type."""
    parts: Parts = take_apart(files[1].read_bytes())
    parts.set("split.no", UINT32, 1)
    parts.raw().write(files[1])
    with kvg.Model(files[0], device="cpu") as model:
        assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"


@pytest.mark.parametrize("first", [0, 200])
def test_mutants(tmp_path: Path, first: int) -> None:
    """Damaged models, in processes of their own."""
    arguments = ["-m", "support.hostile_split", str(tmp_path), str(first), str(N_MUTANTS)]
    run = subprocess.run(
        [sys.executable, *arguments], cwd=TESTS, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr[-4000:]
    sound, *trials = map(json.loads, run.stdout.splitlines())
    assert sound["verdict"] == "file:ok tokenizer:ok model:ok"
    assert len(trials) == N_MUTANTS
    assert [trial for trial in trials if trial["verdict"].startswith("!")] == []
    fine = Counter(trial["verdict"] for trial in trials)[sound["verdict"]]
    # else all could have been refused, or accepted, at the first step
    assert 0.1 * N_MUTANTS < fine < 0.5 * N_MUTANTS

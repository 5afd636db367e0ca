from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path

import pytest

from pykvgraph import env
from pykvgraph.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("word", "level"),
    [
        ("debug", logging.DEBUG),
        ("INFO", logging.INFO),
        ("warning", logging.WARNING),
        ("Error", logging.ERROR),
    ],
)
def test_log_level(word: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAPH_LOG", word)
    assert env.log_level() == level


def test_unset_and_empty_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KVGRAPH_LOG", "KVGRAPH_LIB"):
        monkeypatch.delenv(variable, raising=False)
    assert env.log_level() is None
    assert env.path(env.LIBRARY) is None
    for variable in ("KVGRAPH_LOG", "KVGRAPH_LIB"):
        monkeypatch.setenv(variable, "")
    assert env.log_level() is None
    assert env.path(env.LIBRARY) is None


@pytest.mark.parametrize("word", ["verbose", "1", " info", "warn"])
def test_bad_log_level_names_the_variable(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAPH_LOG", word)
    with pytest.raises(InvalidArgumentError, match=r"KVGRAPH_LOG.*debug, info, warning, error"):
        env.log_level()


def test_path_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVGRAPH_LIB", "here/libkvgraph.so")
    assert env.path(env.LIBRARY) == tmp_path / "here" / "libkvgraph.so"


def test_every_variable_is_in_the_table() -> None:
    for variable in (
        env.LIBRARY,
        env.LOG,
        env.LLAMA_CPP_LIBRARIES,
        env.CACHES,
        env.OPENMP_SPINS,
        env.CUDA_PDL,
    ):
        assert f"| `{variable}`" in (env.__doc__ or "")


def test_nobody_else_reads_the_environment() -> None:
    package = Path(env.__file__).parent
    library = [path for path in package.rglob("*.py") if "cli" not in path.relative_to(package).parts]
    reads = re.compile(r"\b(environb?|getenvb?)\b")
    assert [path.name for path in library if reads.search(path.read_text(encoding="utf-8"))] == ["env.py"]


def test_stream_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGRAPH_STREAM_LEVEL", raising=False)
    assert env.stream_level() == 3
    for level in range(4):
        monkeypatch.setenv("KVGRAPH_STREAM_LEVEL", str(level))
        assert env.stream_level() == level
    for word in ("4", "-1", "high", " 1"):
        monkeypatch.setenv("KVGRAPH_STREAM_LEVEL", word)
        with pytest.raises(InvalidArgumentError, match="expected 0, 1, 2 or 3"):
            env.stream_level()


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
@pytest.mark.parametrize("value", ["7", ""])
def test_openmp_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, value)
    before = dict(os.environ)
    with env.openmp_spins():
        assert dict(os.environ) == before
    assert dict(os.environ) == before


def test_openmp_is_set_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(each, raising=False)
    before = dict(os.environ)
    with contextlib.suppress(ImportError), env.openmp_spins():
        assert dict(os.environ) == {**before, "GOMP_SPINCOUNT": str(env.SPINS)}
        raise ImportError
    assert dict(os.environ) == before


@pytest.mark.parametrize(("value", "expected"), [(None, "0"), ("1", "1"), ("", "")])
def test_cuda_kernels_run_in_order_unless_told(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str
) -> None:
    monkeypatch.setenv("GGML_CUDA_PDL", "set back when the test ends")
    if value is None:
        monkeypatch.delenv("GGML_CUDA_PDL")
    else:
        monkeypatch.setenv("GGML_CUDA_PDL", value)
    env.cuda_kernels_in_order()
    assert os.environ["GGML_CUDA_PDL"] == expected

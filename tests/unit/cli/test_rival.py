"""`--vs COMMAND`: what can be started, and what is said of what can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvgraph.cli.rival import programs_of, rival_of
from pykvgraph.errors import InvalidArgumentError


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "with a blank" / "llama-bench"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_name_without_the_folder_and_with_options(program: Path) -> None:
    assert rival_of(str(program)) == ("llama-bench", [str(program)])
    assert rival_of(f"'{program}' -rtr 1") == ("llama-bench -rtr 1", [str(program), "-rtr", "1"])
    assert rival_of("sh -e")[1] == ["sh", "-e"]


def test_libllama_is_no_program() -> None:
    assert [name for name, _ in programs_of(["libllama", "sh", "libllama"])] == ["sh"]


def test_what_cannot_be_started(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    script = program.with_name("script")
    script.touch(0o644)
    for command, why in (
        ("no-such-program -t 1", "there is no program no-such-program"),
        ("", "there is no program"),
        ("'unended", "is no command line: No closing quotation"),
        (f"'{program.parent}'", "is a folder: give the program in it"),
        (str(script), "can't be executed: `chmod +x`"),
        ("llama-bench", "it is on no PATH: give ./llama-bench"),
    ):
        with pytest.raises(InvalidArgumentError) as error:
            rival_of(command)
        assert str(error.value).startswith(f"--vs {command!r}")
        assert why in str(error.value)

"""-m, -hf, -hff, -hft, -mu and --offline: what is downloaded, and from where, before the verb runs."""

from __future__ import annotations

import os
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pykvgraph.cli import download
from pykvgraph.cli.verb import Verb, model_option


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is downloaded, in place of doing it."""
    asked: list[Any] = []

    def downloaded(source: str, **how: bool) -> str:
        asked.append((source, how))
        return "a.gguf"

    monkeypatch.setattr(download, "downloaded", downloaded)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.setenv(name, "before")  # is put back, whatever the verb sets
    return asked


def run(*arguments: str) -> Result:
    @click.command(cls=Verb)
    @model_option()
    def verb(model: str | None) -> None:
        click.echo(f"{model} {os.environ['HF_HUB_OFFLINE']} {os.environ['HF_TOKEN']}")

    return CliRunner().invoke(verb, arguments)


@pytest.mark.parametrize(
    ("words", "source", "how", "after"),
    [
        ("-hf a/b:Q4_0", "a/b:Q4_0", {"from_hub": True, "offline": False}, "before before"),
        ("-hfr a/b", "a/b", {"from_hub": True, "offline": False}, "before before"),
        ("-hf a/b:Q4_0 -hff c.gguf", "a/b:c.gguf", {"from_hub": True, "offline": False}, "before before"),
        ("-hf a/b -hft secret", "a/b", {"from_hub": True, "offline": False}, "before secret"),
        ("-hf a/b --offline", "a/b", {"from_hub": True, "offline": True}, "1 before"),
        (
            "-mu http://a/b.gguf --offline",
            "http://a/b.gguf",
            {"from_hub": False, "offline": True},
            "1 before",
        ),
    ],
)
def test_where_a_model_comes_from(
    asked: list[Any], words: str, source: str, how: dict[str, bool], after: str
) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (0, f"a.gguf {after}\n")
    assert asked == [(source, how)]


def test_a_file_of_no_repository(asked: list[Any]) -> None:
    result = run("-m", "a.gguf", "-hff", "c.gguf")
    assert result.exit_code == 2
    assert "-hff names a file of the repository that -hf names" in result.stderr
    assert not asked


def test_a_path_is_not_downloaded(asked: list[Any]) -> None:
    assert run("-m", "b.gguf", "--offline").stdout == "b.gguf 1 before\n"
    assert not asked

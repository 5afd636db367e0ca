"""The commands of the README and of docs/ parse, as far as click and make can tell without running them."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from pykvgraph.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENDS = {"|", ">", "2>", "&&", ";"}  # of a command, in a line of a shell


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command in a block that is no Python, and of each one in backticks within a text."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for kind, block in blocks if kind != "python" for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    # "pykvgraph bench" there is a verb's name
    lines += [line for line in re.findall(r"`([^`\n]+)`", prose) if not re.fullmatch(r"pykvgraph \w+", line)]
    programs = re.compile(r"(\w+=\S+ )*(pykvgraph|make|python|pytest) ")
    return [command(line) for line in lines if programs.match(line)]


def command(line: str) -> list[str]:
    """The words of the first command, without variables that are set for it."""
    words = shlex.split(line, comments=True)
    end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
    begin = next(i for i, word in enumerate(words) if "=" not in word)
    return words[begin:end]


def check(words: list[str]) -> None:
    """Raises click's UsageError, or AssertionError, for a command that can't be run."""
    program, *arguments = words
    if program == "pykvgraph" and arguments[0] != "--help":
        verb = main.commands.get(arguments[0])
        assert verb is not None, f"no verb {arguments[0]}"
        if "--help" not in arguments:
            # as the program does; a verb asked by itself would know no -h from then on
            whole = click.Context(main, info_name="pykvgraph", **main.context_settings)
            with whole, verb.make_context(arguments[0], arguments[1:], parent=whole):
                pass
    elif program == "make":
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{re.escape(arguments[0])}:", targets, re.MULTILINE), f"no target {arguments[0]}"
    elif program == "python" and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).exists(), f"no script {arguments[0]}"
    elif program == "pytest":
        for name in [word for word in arguments if ".py" in word]:
            check_test(name)


def check_test(name: str) -> None:
    """FILE or FILE::FUNCTION, as pytest takes them in tests/."""
    path, _, function = name.partition("::")
    file = ROOT / "tests" / path
    assert file.exists(), f"no file {path}"
    if function:
        found = ast.parse(file.read_text(encoding="utf-8")).body
        assert function in [node.name for node in found if isinstance(node, ast.FunctionDef)], f"no {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.name)
def test_commands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("docs", "build/real"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("prompts.jsonl", "news.txt", "build/real/news.txt"):  # which click opens before all else
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for words in commands_of(page):
        try:
            check(words)
        except (click.ClickException, AssertionError) as error:
            pytest.fail(f"{shlex.join(words)}: {error}")


@pytest.mark.parametrize(
    "line",
    [
        "pykvgraph generat -m a.gguf",
        "pykvgraph bench --nothing",
        "pykvgraph passkey --trials 0",
        "make nothing",
        "pytest unit/test_nothing.py",
        "pytest unit/test_docs.py::test_nothing",
    ],
)
def test_what_is_no_command(line: str) -> None:
    with pytest.raises((click.ClickException, AssertionError)):
        check(command(line))


def test_there_are_commands() -> None:
    verbs = {words[1] for page in PAGES for words in commands_of(page) if words[0] == "pykvgraph"}
    assert {"info", "inspect", "generate", "cells", "passkey", "bench"} <= verbs

"""The table of clients in docs/serve.md: each cell has a test, and each test of a client its cell."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serve.md"
MARK = "pytest.mark.client"


def table() -> tuple[dict[str, str], set[tuple[str, str]]]:
    """The version of each client that the head tells, and the cells that say yes: a client and a use."""
    part = PAGE.read_text(encoding="utf-8").split("\n## Clients\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    versions = dict(name.split(" ") for name in head[1:])
    cells = {
        (client, row[0])
        for row in rows
        for client, cell in zip(versions, row[1:], strict=True)
        if cell == "yes"
    }
    assert all(cell in ("yes", "") for row in rows for cell in row[1:])
    return versions, cells


def marked() -> Iterator[tuple[str, str]]:
    """What the tests' marks say."""
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if MARK not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
                    client, use = map(ast.literal_eval, mark.args)
                    yield client, use


def test_each_cell_has_a_test_and_each_test_a_cell() -> None:
    _, cells = table()
    assert cells == set(marked())


def test_versions_are_those_that_are_tested() -> None:
    """Of what `make clients` installs exactly; others are at least of the version that is told."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    exact = dict(re.findall(r'"([\w-]+?)(?:-slim)?(?:\[[\w,]+\])?==([\d.]+)"', text))
    for client, version in table()[0].items():
        if client in exact:
            assert version == exact[client]
        else:
            assert _numbers(importlib.metadata.version(client)) >= _numbers(version), client


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize("client", ["litellm", "pydantic-ai", "instructor", "lm-eval"])
def test_clients_of_their_own_environments_are_told(client: str) -> None:
    assert client in table()[0]

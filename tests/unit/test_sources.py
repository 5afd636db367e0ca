"""The page on the five sources: rows are numbered and counted, each shows how, and options exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import click

from pykvgraph.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
TEXT = PAGE.read_text(encoding="utf-8")
STATES = ["works", "better", "in part", "not done"]
SOURCES = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)


def rows_of(source: str) -> list[list[str]]:
    """The cells of each row: a number, what the source has, what is here, a command, a state."""
    part = TEXT.split(f"\n## {source}\n")[1].split("\n## ")[0]
    lines = [line.strip("|") for line in part.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def state_of(row: list[str]) -> str:
    found = next((state for state in STATES if row[-1].startswith(state)), "")
    assert found, row
    return found


def test_rows_are_numbered() -> None:
    numbers = [int(row[0]) for source in SOURCES for row in rows_of(source)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(SOURCES) == 5 and len(numbers) > 60


def test_each_row_has_one_command_and_a_state() -> None:
    """Whether there are such tests, scripts and options, test_docs_commands.py asks."""
    for source in SOURCES:
        for row in rows_of(source):
            assert len(row) == 5, row
            (command,) = re.findall(r"^`([^`]+)`$", row[3])
            assert re.match(r"(pykvgraph|pytest|python|make) ", command), row
            assert command.split()[1] in main.commands or not command.startswith("pykvgraph"), row
            if state_of(row) in ("in part", "not done"):
                assert ":" in row[-1] or "<!--" in row[-1], f"why? {row}"


def test_rows_are_counted() -> None:
    counted = [Counter(state_of(row) for row in rows_of(source)) for source in SOURCES]
    counted.append(sum(counted, Counter()))
    told = re.findall(r"^\| (?:\[[^|]+|all) \|((?: \d+ \|){5})$", TEXT, re.MULTILINE)
    expected = [[count.total(), *(count[state] for state in STATES)] for count in counted]
    assert [[int(n) for n in re.findall(r"\d+", line)] for line in told] == expected


def test_options_are_those_of_a_verb() -> None:
    options = {
        name
        for verb in main.commands.values()
        for param in verb.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }
    named = re.findall(r"`(--?[a-z][\w-]*)", TEXT)
    assert len(named) > 5
    assert [name for name in named if name not in options] == []

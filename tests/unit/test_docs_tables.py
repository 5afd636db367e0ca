"""The tables of docs/ that list things of the code list all of them: environment variables, exceptions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import click
from support.arch_table import PAGE, markdown, with_rows, written

from pykvgraph import env, errors
from pykvgraph.cli import main
from pykvgraph.model.architectures import architectures

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = Path(env.__file__).parent


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table rows under a heading, without the table's head."""
    text = (DOCS / page).read_text(encoding="utf-8")
    part = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert part is not None, heading
    table = re.findall(r"^\|(.*)\|$", part[1], re.MULTILINE)
    cells_of = [[cell.strip() for cell in line.split("|")] for line in table]
    return [cells for cells in cells_of if cells[0].startswith("`")]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_the_librarys_variables() -> None:
    listed = [names(cells[0])[0] for cells in rows("environment-variables.md", "pykvgraph's own")]
    assert listed == [env.LIBRARY, env.LOG, env.STREAM_LEVEL, env.LLAMA_CPP_LIBRARIES, env.CACHES]


def test_the_options_variables() -> None:
    """Row for row: in alphabetical order, as the verbs have them."""
    found = {
        (variable, f"`{name}`")
        for verb in main.commands.values()
        for param in verb.params
        if isinstance(param, click.Option)
        for variable, name in zip(
            param.envvar or (), [name for name in param.opts if name.startswith("--")], strict=True
        )
    }
    listed = [
        (names(cells[0])[0], cells[1])
        for cells in rows("environment-variables.md", "Options of the command line")
    ]
    assert listed == sorted(found)


def test_variables_of_others() -> None:
    """Those that the package's text names, and those that it reads."""
    listed = {name for cells in rows("environment-variables.md", "Of others") for name in names(cells[0])}
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    read = re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", text) + re.findall(r"\bHF_[A-Z_]+\b", text)
    assert set(read) <= listed
    assert "_PYKVGRAPH_COMPLETE" in listed


def test_the_exceptions() -> None:
    """Each class of errors.py has a row, and the row says what else it is."""
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    found = {
        name: {base.__name__ for base in value.__bases__ if base not in (errors.KVGraphError, Exception)}
        for name, value in classes.items()
    }
    table = {
        names(cells[0])[0]: set(names(cells[1])) for cells in rows("errors.md", "Errors") if len(cells) == 4
    }
    assert table == found


def test_the_architectures() -> None:
    """What `pytest --write-architectures` wrote into the page is what the package has."""
    assert "\n".join(markdown(architectures())) in PAGE.read_text(encoding="utf-8")


def test_rows_that_a_run_did_not_make_stay() -> None:
    table = written()
    known, unknown = replace(table[3], files=99), replace(table[0], name="arcane")
    names = [row.name for row in table]
    merged = with_rows(table, [unknown, known])
    assert [row.name for row in merged] == sorted([*names, "arcane"])
    assert [row for row in merged if row not in table] == sorted([unknown, known], key=lambda row: row.name)

"""The table of architectures, made of what the tests compared: `pytest --write-architectures`.

A test leaves a `Compared` with pytest's record_property; the plugin gathers all of them, from xdist's
workers, too, and writes pykvgraph/model/architectures.json and the table of docs/architectures.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pykvgraph.model.architectures import TABLE, Architecture, figure_text

FLOOR = 1e-6  # judge's, which imports the native library

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architectures.md"
HEAD = ["architecture", "keeps", "files", "F32", "F16", "libllama's own", "after edits"]
PROPERTY = "compared"

Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Judged:
    """NMSE beside libllama. exact: where nothing is rounded; None where weights are. own: libllama's."""

    exact: float | None
    worst: float
    own: float

    @property
    def share(self) -> float:
        """Of what the rule allows."""
        return self.worst / max(FLOOR, 2 * self.own)


@dataclass(frozen=True)
class Edited:
    """NMSE after edits, beside a fresh context of ours."""

    error: float


@dataclass(frozen=True)
class Compared:
    """What a test saw of a file."""

    arch: str
    cells: list[str]
    judged: Judged | None
    edited: Edited | None


def cells_of(path: Path) -> tuple[str, list[str]]:
    """A file's architecture, and what its layers keep of earlier tokens."""
    import pykvgraph as kvg

    with kvg.GgufFile(path) as file:
        info, layers = file.model_info(), file.layers()
    kept = {kind for layer in layers for kind in layer.kind.split(", ") if kind not in ("", "attention")}
    kept |= {"window" if layer.window else "every position" for layer in layers if layer.group >= 0}
    return info.arch, ["nothing"] if info.encodes else sorted(kept)


def leave(record: Record, path: Path, seen: Judged | Edited) -> None:
    """For the table, when this run makes one."""
    judged = dataclasses.asdict(seen) if isinstance(seen, Judged) else None
    edited = dataclasses.asdict(seen) if isinstance(seen, Edited) else None
    arch, cells = cells_of(path)
    record(PROPERTY, {"arch": arch, "cells": cells, "judged": judged, "edited": edited})


def read(left: Any) -> Compared:
    """What leave() recorded."""
    judged, edited = left["judged"], left["edited"]
    return Compared(left["arch"], left["cells"], judged and Judged(**judged), edited and Edited(**edited))


def table_of(all_compared: Sequence[Compared]) -> list[Architecture]:
    """By name; those that only tests of edits have seen are left out."""
    found = []
    for name in sorted({each.arch for each in all_compared if each.judged}):
        mine = [each for each in all_compared if each.arch == name]
        judged = [each.judged for each in mine if each.judged]
        worst = max(judged, key=lambda each: each.share)
        found.append(
            Architecture(
                name,
                tuple(sorted({kind for each in mine if each.judged for kind in each.cells})),
                len(judged),
                _largest(each.exact for each in judged),
                _rounded(worst.worst),
                _rounded(worst.own),
                _largest(each.edited.error for each in mine if each.edited),
            )
        )
    return found


def written() -> list[Architecture]:
    """The table as an earlier run left it."""
    rows = json.loads((ROOT / "pykvgraph" / "model" / TABLE).read_text(encoding="utf-8"))
    return [Architecture(**{**row, "cells": tuple(row["cells"])}) for row in rows]


def with_rows(table: Sequence[Architecture], new: Sequence[Architecture]) -> list[Architecture]:
    """Rows that a run didn't make stay as they were, so `-k NAME` writes one."""
    return sorted({row.name: row for row in [*table, *new]}.values(), key=lambda row: row.name)


def markdown(table: Sequence[Architecture]) -> list[str]:
    """The table's lines."""
    rows = [HEAD, ["---"] * len(HEAD)]
    for row in table:
        figures = [figure_text(figure) for figure in (row.exact, row.worst, row.own, row.edited)]
        rows.append([f"`{row.name}`", ", ".join(row.cells), str(row.files), *figures])
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]


def _largest(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return _rounded(max(known)) if known else None


def _rounded(figure: float) -> float:
    return float(f"{figure:.1e}")


class TableWriter:
    """A pytest plugin of the process that gathers the reports."""

    def __init__(self) -> None:
        self._compared: list[Compared] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._compared += [read(value) for name, value in report.user_properties if name == PROPERTY]

    def pytest_sessionfinish(self) -> None:
        table = with_rows(written(), table_of(self._compared))
        rows = [dataclasses.asdict(row) for row in table]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        (ROOT / "pykvgraph" / "model" / TABLE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8").splitlines()
        first = page.index(markdown([])[0])
        behind = next((i for i in range(first, len(page)) if not page[i].startswith("|")), len(page))
        PAGE.write_text("\n".join([*page[:first], *markdown(table), *page[behind:]]) + "\n", encoding="utf-8")

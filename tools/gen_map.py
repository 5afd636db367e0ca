"""Writes into docs/architecture.md what each file of pykvgraph is for: the first line of its docstring.

    python tools/gen_map.py

Rooms come from the top, in the order of LAYERS in tests/unit/test_rooms.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "pykvgraph"
BEGIN, END = "<!-- tools/gen_map.py writes from here -->", "<!-- to here -->"
_ROOT_ROOM = "beside the rooms"


def first_line(path: Path) -> str:
    """Of a module's docstring, without the full stop."""
    told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return told.partition("\n")[0].rstrip(".").replace("|", "\\|")


def table(folder: Path) -> Iterator[str]:
    """The files of a folder, and then the folders in it as tables of their own."""
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    if folder == PACKAGE:
        yield f"### {_ROOT_ROOM}"
        yield "What everything may use, and the entry of `python -m pykvgraph`."
    else:
        yield f"### {folder.relative_to(PACKAGE)}/"
        yield f"{first_line(folder / '__init__.py')}."
    if files:
        yield "\n| file | what it is |\n|---|---|"
        yield from (f"| `{path.stem}` | {first_line(path)} |" for path in files)
    yield ""
    if folder != PACKAGE:
        for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
            yield from table(inner)


def written(text: str, rooms: list[str]) -> str:
    """The page with its tables as the files are now. rooms: folders of the package, from the top."""
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    tables = [line for room in rooms for line in table(PACKAGE / room)]
    return "\n".join([before + BEGIN, *tables, *table(PACKAGE), END + behind])


def rooms_from_the_top() -> list[str]:
    """The folders of the package that LAYERS names."""
    plan = ROOT / "tests" / "unit" / "test_rooms.py"
    found = [
        node.value
        for node in ast.parse(plan.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LAYERS" and node.value
    ]
    layers: list[set[str]] = ast.literal_eval(found[0])
    rooms = [name for layer in reversed(layers) for name in sorted(layer)]
    return [name for name in rooms if (PACKAGE / name / "__init__.py").exists()]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rooms_from_the_top()), encoding="utf-8")

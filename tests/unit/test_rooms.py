"""The package's plan: imports point downwards, none of them in a circle, and no two things share a name."""

from __future__ import annotations

import ast
import graphlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import pykvgraph as kvg
from pykvgraph import viz

ROOT = Path(kvg.__path__[0])
FACE = "pykvgraph"

# From the bottom up. A module imports from its own room and from those below. A module of the root is a room.
LAYERS: list[set[str]] = [
    {"errors", "interrupted", "types"},
    {"checks", "env", "models"},
    {"_native", "download"},
    {"params"},
    {"model"},
    {"kv_cache", "plan", "sampling"},
    {"context"},
    {"prefix", "stream"},
    {"sequence", "tiers"},
    {"chat", "engine", "reply"},
    {"demos", "llama", "openai"},
    {"server"},
    {"cluster"},
    {"bench"},
    {"viz"},
    {"cli"},
    {"__main__"},
]
_MOST_IN_ROOT = 10  # modules; a stranger reads their names first
# folders and modules of the root; pairs of them, one of which imports the other
_MOST_ROOMS, _MOST_ARROWS = 38, 229


class Import(NamedTuple):
    """One module names another of the package."""

    importer: str  # "cli.generate"; the face is ""
    imported: str
    when: str  # "at once", "for types" (under TYPE_CHECKING), "late" (inside a function)

    def __str__(self) -> str:
        return f"{self.importer or FACE} imports {self.imported or FACE} ({self.when})"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imported_modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules of the package that a statement names; those that it runs on the way are not counted."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name == FACE or alias.name.startswith(f"{FACE}."):
                yield alias.name[len(FACE) + 1 :]
        return
    assert node.level == 0, f"a relative import, of {node.module}"
    source = node.module or ""
    if source != FACE and not source.startswith(f"{FACE}."):
        return
    for alias in node.names:
        name = f"{source}.{alias.name}"[len(FACE) + 1 :]
        yield name if name in MODULES else source[len(FACE) + 1 :]


def imports_of(module: str) -> Iterator[Import]:
    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in imported_modules(node):
                yield Import(module, name, when)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                yield from visit(statement, "for types")
            for statement in node.orelse:
                yield from visit(statement, when)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, "late" if inside else when)

    return visit(ast.parse(MODULES[module].read_text(encoding="utf-8")), "at once")


IMPORTS = [found for module in MODULES for found in imports_of(module)]


def room(module: str) -> str:
    """The folder that a module is in, the outermost; a module of the root is its own."""
    return module.split(".")[0]


def layer(module: str) -> int:
    """Of its room."""
    found = [i for i, rooms in enumerate(LAYERS) if room(module) in rooms]
    assert found, f"{room(module)} has no layer: give it one in LAYERS, and in docs/architecture.md"
    return found[0]


def test_the_imports_are_read() -> None:
    """Some that are there today, so that the tests below are about something."""
    assert Import("context.context", "kv_cache.cache", "at once") in IMPORTS
    assert Import("_native.loader", "env", "at once") in IMPORTS  # from pykvgraph import env
    assert Import("cli.generate", "types", "for types") in IMPORTS
    assert Import("cli.generate", "", "late") in IMPORTS


def test_no_circle() -> None:
    """Of modules. Whoever reads one of them reads what it imports for types, too. A verb may use the face."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in IMPORTS:
        if found.when != "late" or layer(found.importer) < layer("cli"):
            graph[found.importer].add(found.imported)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_imports_point_downwards() -> None:
    """Rooms of one layer know nothing of each other."""
    inside = [found for found in IMPORTS if found.importer and found.imported]
    between = [found for found in inside if room(found.importer) != room(found.imported)]
    assert not [str(found) for found in between if layer(found.imported) >= layer(found.importer)]


def test_the_root_is_small() -> None:
    assert (
        sum("." not in name and path.name != "__init__.py" for name, path in MODULES.items()) < _MOST_IN_ROOT
    )


def test_the_plan_is_small() -> None:
    """Each folder counts as a room, an inner one too. pytest -rP shows the figures."""

    def folder(module: str) -> str:
        return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0] or module

    inside = [(folder(found.importer), folder(found.imported)) for found in IMPORTS if found.importer]
    arrows = {(importer, imported) for importer, imported in inside if imported and importer != imported}
    rooms = {folder(module) for module in MODULES if module}
    print(f"{len(rooms)} rooms, {len(arrows)} arrows between them")
    assert len(rooms) <= _MOST_ROOMS
    assert len(arrows) <= _MOST_ARROWS


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert "Context" in homes
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_only_programs_use_the_face() -> None:
    """Everything else would import itself."""
    assert not [str(found) for found in IMPORTS if not found.imported and found.when == "at once"]
    users = {found.importer for found in IMPORTS if not found.imported}
    assert not {module for module in users if layer(module) < layer("cli")}


def test_imported_late_is_what_a_first_token_does_without() -> None:
    """And what the command line does, for quick help. Other late imports would only hide a thought."""
    late = {
        found.imported for found in IMPORTS if found.when == "late" and layer(found.importer) < layer("cli")
    }
    assert late == {
        "chat.chat_template",
        "context.trace",
        "download.hub",
        "kv_cache.maps.snapshot",
        "kv_cache.reserved_cells",
        "kv_cache.saved.file",
        "kv_cache.saved.format",
        "kv_cache.saved.geometry",
        "kv_cache.saved.transfer",
        "llama.cache",
        "model.device",
        "plan.fitting",
        "sampling.guide_text",
        "sampling.rules",
    }


@pytest.mark.parametrize("face", [kvg, viz], ids=lambda face: face.__name__)
def test_no_module_has_the_name_of_a_public_function(face: ModuleType) -> None:
    """`import pykvgraph.generate` would replace the function. A file in cli has its verb's name."""
    if not hasattr(face, "__all__"):
        pytest.skip("the package is not installed, so it can't be imported")
    functions = {name for name in face.__all__ if inspect.isfunction(getattr(face, name))}
    assert functions
    last = {module.split(".")[-1] for module in MODULES if module and not module.startswith("cli.")}
    assert not functions & last


def test_plan_is_a_package() -> None:
    """Not the function that it once was: that is plan_memory."""
    if not hasattr(kvg, "__all__"):
        pytest.skip("the package is not installed, so it can't be imported")
    assert kvg.plan.__path__
    assert "plan" in kvg.__all__ and "plan_memory" in kvg.__all__

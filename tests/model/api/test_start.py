"""What is imported on the way to a first token: the rest comes when somebody asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TELL = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
GENERATE = """
import pykvgraph as kvg
ctx = kvg.Context(kvg.Model({path!r}, "cpu"), n_ctx=64)
print(*kvg.generate(ctx, "Once", max_tokens=1, temperature=0.0))
"""
LLAMA = """
from pykvgraph.llama import Llama
print(Llama({path!r}, n_ctx=64, verbose=False)("Once", max_tokens=1, temperature=0))
"""
PACKAGES = {"asyncio", "concurrent", "html", "http", "jinja2", "llama_cpp", "secrets", "socket"}
# modules and what is in them
ROOMS = {
    "pykvgraph.model.device_types",
    "pykvgraph.engine",
    "pykvgraph.engine.types",
    "pykvgraph.download.hub",
    "pykvgraph.kv_cache.reserved_cells",
    "pykvgraph.kv_cache.maps",
    "pykvgraph.plan",
    "pykvgraph.kv_cache.saved.transfer",
    "pykvgraph.stream",
    "pykvgraph.chat.chat_template",
    "pykvgraph.sampling.grammar",
    "pykvgraph.sampling.grammar_text",
    "pykvgraph.tiers",
}


@pytest.mark.parametrize(
    "program", ["import pykvgraph", GENERATE, LLAMA], ids=["import", "generate", "llama"]
)
def test_nothing_is_imported_that_a_first_token_does_without(program: str, stories: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program.format(path=str(stories)) + TELL],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "pykvgraph.sequence.decode_loop" in modules
    assert {name for name in modules if name.split(".")[0] in PACKAGES} == set()
    assert {room for room in ROOMS for name in modules if f"{name}.".startswith(f"{room}.")} == set()


def test_what_is_imported_late_is_in_the_face(stories: Path) -> None:
    """By its name, in dir(), and once: the second time it is the same."""
    program = """
import pykvgraph as kvg
assert set(kvg.__all__) <= set(dir(kvg))
for name in kvg.__all__:
    assert getattr(kvg, name) is getattr(kvg, name), name
assert kvg.plan.MemoryModel
try:
    kvg.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "module 'pykvgraph' has no attribute 'nothing'"

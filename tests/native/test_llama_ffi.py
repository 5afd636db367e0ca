"""libllama's functions as declared here, beside llama_cpp's declarations; and llama_cpp beside them."""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pykvgraph._native import llama_ffi

REFEREE: Any = importlib.import_module("llama_cpp.llama_cpp")

ONE_LIBLLAMA = """
import json, os
from pathlib import Path
files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/lib" in line}
names = sorted(os.path.basename(file).split(".")[0] for file in files)
print(json.dumps([name for name in names if name.startswith(("libllama", "libggml"))]))
"""


def shape(kind: Any) -> object:
    """What a call has to know of a type."""
    if kind is None:
        return None
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        return [
            (name, getattr(kind, name).offset, getattr(kind, name).size, shape(part))
            for name, part in kind._fields_
        ]
    if issubclass(kind, (ctypes.c_void_p, ctypes._Pointer)) or kind.__name__ == "CFunctionType":
        return "pointer"
    if issubclass(kind, ctypes.Array):
        return shape(kind._type_), kind._length_
    return kind


@pytest.mark.parametrize("name", llama_ffi.FUNCTIONS)
def test_functions_are_declared_as_by_llama_cpp(name: str) -> None:
    ours = getattr(llama_ffi.declared(ctypes.CDLL(REFEREE._lib._name)), name)
    theirs = getattr(REFEREE, name)
    assert shape(ours.restype) == shape(theirs.restype)
    assert [shape(each) for each in ours.argtypes] == [shape(each) for each in theirs.argtypes]


def test_what_is_called_is_declared() -> None:
    """Wherever a function is named in the package. Those whose names are made while it runs have tests."""
    sources = [path.read_text(encoding="utf-8") for path in Path(llama_ffi.__file__).parents[1].rglob("*.py")]
    called = {name for source in sources for name in re.findall(r"\bllama\.(llama_\w+)", source)}
    assert len(called) > 30
    assert called <= {*llama_ffi.FUNCTIONS, *llama_ffi.STRUCTS}


@pytest.mark.parametrize("name", llama_ffi.STRUCTS)
def test_structs_are_declared_as_by_llama_cpp(name: str) -> None:
    assert shape(llama_ffi.STRUCTS[name]) == shape(getattr(REFEREE, name))
    assert ctypes.sizeof(llama_ffi.STRUCTS[name]) == ctypes.sizeof(getattr(REFEREE, name))


@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_llama_cpp_imported_beside_it_is_the_whole_package_on_the_same_libraries(
    stories: Path, order: str
) -> None:
    theirs = (
        "import llama_cpp, llama_cpp.llama_cpp; from llama_cpp import Llama\n"
        f"llama = Llama({str(stories)!r}, n_ctx=64, verbose=False, n_gpu_layers=0)\n"
        "said = llama('Once', max_tokens=4, temperature=0)['choices'][0]['text']\n"
    )
    imported = "import pykvgraph as kvg\n"
    ours = (
        f"ctx = kvg.Context(kvg.Model({str(stories)!r}, 'cpu'), n_ctx=64)\n"
        "text = ''.join(each.text for each in kvg.generate(ctx, 'Once', max_tokens=4, temperature=0.0))\n"
    )
    parts = [imported, ours]
    parts.insert(["before", "between", "after"].index(order), theirs)
    program = "".join(parts) + "assert said == text, (said, text)" + ONE_LIBLLAMA
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    mapped = json.loads(done.stdout)
    assert "libllama" in mapped
    assert len(mapped) == len(set(mapped))

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("cffi", reason="cffi is the generator's parser")

ROOT = Path(__file__).parents[3]

HEADER = """\
/* A comment; with a KVG_API in it. */
#ifndef SMALL_H
#define SMALL_H
#include <stdint.h>
#define KVG_API __attribute__((visibility("default")))
#ifdef __cplusplus
extern "C" {
#endif
typedef enum kvg_status { KVG_OK = 0, KVG_BAD = 1 } kvg_status;
typedef enum kvg_side { KVG_LEFT = -1, KVG_RIGHT = 1 } kvg_side;
typedef struct kvg_thing kvg_thing;
typedef void (*kvg_note)(int32_t level, const char * text, void * user_data);
typedef struct kvg_box {
    size_t struct_size;
    int64_t ne[4]; /* four */
    const char * name;
    const float * data;
    uint8_t flag;
} kvg_box;
KVG_API const char * kvg_name(void);
KVG_API void kvg_note_set(kvg_note note, void * user_data);
KVG_API kvg_status kvg_open(const char * path,
                            kvg_thing ** out);
KVG_API kvg_status kvg_fill(const kvg_thing * thing, uint64_t index, kvg_box * box, kvg_side side);
KVG_API kvg_status kvg_text(const kvg_thing * thing, const char ** data, uint64_t * length);
#ifdef __cplusplus
}
#endif
#endif
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_ffi", ROOT / "tools" / "gen_ffi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "gen_ffi", module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def binding(tool: ModuleType) -> ModuleType:
    """The generated module of the small header."""
    module = ModuleType("small_ffi")
    exec(tool.render_binding(tool.parse(HEADER)), module.__dict__)
    return module


def test_the_committed_files_are_what_the_header_says(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--check"]) == 0, capsys.readouterr().err


def test_check_tells_a_stale_file_and_writes_nothing(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    header, binding, layout = tmp_path / "small.h", tmp_path / "ffi.py", tmp_path / "layout.cpp"
    header.write_text(HEADER)
    for name, value in (("ROOT", tmp_path), ("HEADER", header), ("BINDING", binding), ("LAYOUT", layout)):
        monkeypatch.setattr(tool, name, value)
    assert tool.main(["--check"]) == 1
    assert not binding.exists() and not layout.exists()
    told = capsys.readouterr().err
    assert "ffi.py is not what small.h says: run python tools/gen_ffi.py" in told
    assert "layout.cpp is not what small.h says: run python tools/gen_ffi.py" in told
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    for stale in (binding, layout):
        text = stale.read_text()
        stale.write_text(text + "\n")
        assert tool.main(["--check"]) == 1
        assert capsys.readouterr().err.startswith(stale.name)
        stale.write_text(text)


def test_every_function_of_the_header_is_declared(tool: ModuleType) -> None:
    text = (ROOT / "native" / "include" / "kvgraph.h").read_text(encoding="utf-8")
    marked = [line for line in text.splitlines() if line.startswith("KVG_API ")]
    assert len(tool.parse(text).functions) == len(marked) > 20


def test_enums(binding: Any) -> None:
    assert {member.name: int(member) for member in binding.KvgSide} == {"KVG_LEFT": -1, "KVG_RIGHT": 1}


def test_structs_are_laid_out_as_c_does(binding: Any) -> None:
    box = binding.KvgBox
    assert [name for name, _ in box._fields_] == ["struct_size", "ne", "name", "data", "flag"]
    assert [getattr(box, name).offset for name, _ in box._fields_] == [0, 8, 40, 48, 56]
    assert ctypes.sizeof(box) == 64
    assert dict(binding.STRUCTS.items()) == {"kvg_box": box}  # and not the opaque one


def test_the_layout_is_what_a_compiler_says(tool: ModuleType, binding: Any, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    # packed here and not in what the tool reads: the answer must be the compiler's
    header = HEADER.replace("typedef struct kvg_box", "#pragma pack(1)\ntypedef struct kvg_box")
    (tmp_path / "kvgraph.h").write_text(header)
    main = 'extern "C" const char * kvg_struct_layout();\nint main() { puts(kvg_struct_layout()); }\n'
    source = tool.render_layout(tool.parse(HEADER)).replace(
        "const char * kvg_struct_layout(void)", 'extern "C" const char * kvg_struct_layout()'
    )
    (tmp_path / "layout.cpp").write_text("#include <cstdio>\n" + source + main)
    program = tmp_path / "layout"
    subprocess.run([compiler, "-I", tmp_path, "-o", program, tmp_path / "layout.cpp"], check=True)
    told = subprocess.run([program], check=True, capture_output=True, text=True).stdout.strip()
    assert told == "kvg_box:57:struct_size@0,ne@8,name@40,data@48,flag@56;"


def test_functions(binding: Any) -> None:
    class Lib:
        def __getattr__(self, name: str) -> Any:
            function = ModuleType(name)
            setattr(self, name, function)
            return function

    lib: Any = Lib()
    binding.declare(lib)
    pointer, box = ctypes.POINTER, binding.KvgBox
    assert (lib.kvg_name.argtypes, lib.kvg_name.restype) == ([], ctypes.c_char_p)
    assert lib.kvg_note_set.argtypes == [binding.KvgNote, ctypes.c_void_p]
    assert lib.kvg_note_set.restype is None
    assert lib.kvg_open.argtypes == [ctypes.c_char_p, pointer(ctypes.c_void_p)]
    assert lib.kvg_fill.argtypes == [ctypes.c_void_p, ctypes.c_uint64, pointer(box), ctypes.c_int32]
    # by length, not by NUL
    assert lib.kvg_text.argtypes == [
        ctypes.c_void_p,
        pointer(pointer(ctypes.c_char)),
        pointer(ctypes.c_uint64),
    ]
    assert lib.kvg_open.restype is ctypes.c_int32
    assert set(vars(lib)) == {"kvg_name", "kvg_note_set", "kvg_open", "kvg_fill", "kvg_text"}
    assert binding.STATUS_FUNCTIONS == ("kvg_open", "kvg_fill", "kvg_text")


def test_a_library_that_lacks_a_function(binding: Any) -> None:
    with pytest.raises(AttributeError, match="kvg_name"):
        binding.declare(ctypes.CDLL(None))


def test_callbacks(binding: Any) -> None:
    heard: list[Any] = []
    note = binding.KvgNote(lambda level, text, data: heard.append((level, text, data)))
    note(2, b"text", None)
    assert heard == [(2, b"text", None)]


def test_the_same_header_gives_the_same_text(tool: ModuleType) -> None:
    assert tool.render_binding(tool.parse(HEADER)) == tool.render_binding(tool.parse(HEADER))


def test_a_type_without_a_word(tool: ModuleType) -> None:
    header = HEADER.replace("uint8_t flag", "long flag")
    with pytest.raises((ValueError, KeyError), match="long"):
        tool.render_binding(tool.parse(header))

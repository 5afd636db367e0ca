from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from pykvgraph._native import ffi, loader

MAPS = """\
55d0-55d1 r-xp 00000000 08:01 131 /usr/bin/python3.11
7f00-7f01 r--p 00000000 08:01 132 /env/llama_cpp/lib/libggml-base.so.0
7f01-7f02 r-xp 00001000 08:01 132 /env/llama_cpp/lib/libggml-base.so.0
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r-xp 00000000 08:01 133 /env/llama_cpp/lib/libggml-cpu.so.0.25.3
7f04-7f05 r-xp 00000000 08:01 134 /my env/lib/libggml.so.0 (deleted)
7f05-7f06 r-xp 00000000 08:01 135 /env/pykvgraph/lib/libkvgraph.so
7f06-7f07 r-xp 00000000 08:01 136 /env/llama_cpp/lib/libllama.so
7f07-7f08 r--p 00000000 08:01 137 /env/notes/libggml.so.txt
7ffc-7ffd rw-p 00000000 00:00 0 [stack]
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The libraries' folder as a wheel unpacks it: three real files for each."""
    for name in ("libggml-base", "libggml-cpu", "libggml-vulkan", "libggml", "libllama"):
        for ending in (".so", ".so.0", ".so.0.25.3"):
            (tmp_path / f"{name}{ending}").write_bytes(b"no library")
    return tmp_path


def test_the_requirement_is_that_of_the_package() -> None:
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    pins = re.findall(r"llama-cpp-python[^\"]*", pyproject)
    assert len(pins) >= 2  # to build with, to run with
    assert set(pins) == {loader.REQUIREMENT}


def test_mapped_libraries() -> None:
    assert loader.mapped_libraries(MAPS) == {
        "libggml-base": {Path("/env/llama_cpp/lib/libggml-base.so.0")},
        "libggml-cpu": {Path("/env/llama_cpp/lib/libggml-cpu.so.0.25.3")},
        "libggml": {Path("/my env/lib/libggml.so.0")},
        "libkvgraph": {Path("/env/pykvgraph/lib/libkvgraph.so")},
    }


def test_preload_order_is_base_backends_ggml_by_soname(wheel: Path) -> None:
    order = ["libggml-base", "libggml-cpu", "libggml-vulkan", "libggml"]
    assert loader.preload_order(wheel, {}) == [wheel / f"{name}.so.0" for name in order]


def test_what_is_mapped_already_is_opened_from_there(wheel: Path) -> None:
    mapped = loader.mapped_libraries(MAPS)
    assert loader.preload_order(wheel, mapped) == [
        Path("/env/llama_cpp/lib/libggml-base.so.0"),
        Path("/env/llama_cpp/lib/libggml-cpu.so.0.25.3"),
        wheel / "libggml-vulkan.so.0",
        Path("/my env/lib/libggml.so.0"),
    ]


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("libgomp.so.1", True),
        ("libgomp-a34b3233.so.1.0.0", True),
        ("libgomp.txt", False),
        ("libomp.so.5", False),
    ],
)
def test_a_libgomp_is_seen(name: str, is_there: bool) -> None:
    assert not loader.has_openmp(MAPS)
    assert loader.has_openmp(MAPS + f"7f09-7f0a r-xp 00000000 08:01 140 /usr/lib/{name}\n") == is_there


def test_one_file_of_each_is_right() -> None:
    loader.check_not_doubled(loader.mapped_libraries(MAPS))


@pytest.mark.parametrize("name", ["libggml", "libggml-base", "libkvgraph"])
def test_two_files_of_one_library(name: str) -> None:
    maps = MAPS + f"7f09-7f0a r-xp 00000000 08:01 140 /other/{name}.so\n"
    with pytest.raises(ImportError, match=rf"{name} is in this process twice: .* and /other/{name}\.so\."):
        loader.check_not_doubled(loader.mapped_libraries(maps))


def test_no_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"Run: pip install llama-cpp-python==0\.3\.36$"):
        loader.find_ggml_directory()


def test_llama_cpp_is_found_without_importing_it(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    package = wheel / "llama_cpp"
    package.mkdir()
    wheel = wheel.rename(wheel.with_name("unpacked"))
    package = wheel / "llama_cpp"
    (package / "lib").mkdir()
    (package / "lib" / "libggml-base.so.0").touch()
    spec = ModuleSpec("llama_cpp", None, origin=str(package / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", {"llama_cpp": spec}.get)
    assert loader.find_ggml_directory() == package / "lib"
    (package / "lib" / "libggml-base.so.0").unlink()
    with pytest.raises(ImportError, match=r"has no libggml-base\.so\.0.*pip install --force-reinstall"):
        loader.find_ggml_directory()


def test_library_path_of_the_environment(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(wheel))
    assert loader.find_ggml_directory() == wheel
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(wheel / "nowhere"))
    with pytest.raises(
        ImportError, match=r"LLAMA_CPP_LIB_PATH is .*nowhere, which has no libggml-base\.so\.0"
    ):
        loader.find_ggml_directory()


def test_a_file_that_is_no_library(wheel: Path) -> None:
    with pytest.raises(ImportError, match=r"libggml\.so\.0 can't be opened: .*Run: mend it$"):
        loader.open_library(wheel / "libggml.so.0", "mend it")


def test_cuda_without_its_libraries(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("libcublas.so.13: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    with pytest.raises(ImportError, match=r"libcublas\.so\.13 is one, or add .* LD_LIBRARY_PATH$"):
        loader.open_library(wheel / "libggml-cuda.so.0", "mend it")


def test_kvgraph_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libkvgraph.so"
    monkeypatch.setenv("KVGRAPH_LIB", str(path))
    with pytest.raises(ImportError, match=r"KVGRAPH_LIB is .* which is no file"):
        loader.find_kvgraph()
    path.touch()
    assert loader.find_kvgraph() == path


def test_kvgraph_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGRAPH_LIB", raising=False)
    source, installed = tmp_path / "source", tmp_path / "installed"
    monkeypatch.setattr(sys.modules["pykvgraph"], "__path__", [str(source), str(installed)])
    with pytest.raises(ImportError, match=r"source/lib/libkvgraph\.so is missing.*pip install.*KVGRAPH_LIB"):
        loader.find_kvgraph()
    path = installed / "lib" / "libkvgraph.so"
    path.parent.mkdir(parents=True)
    path.touch()
    assert loader.find_kvgraph() == path


@pytest.mark.parametrize(("running", "fits"), [("0.25.3", True), ("0.9.4", False), ("0.25.30", False)])
def test_ggml_versions(running: str, fits: bool) -> None:
    library = loader.Library(
        lib=ctypes.CDLL(None),
        path=Path("/env/pykvgraph/lib/libkvgraph.so"),
        version="0.1.0",
        ggml_version_built="0.25.3",
        ggml_version_running=running,
        ggml_paths=(Path("/other/libggml-base.so.0"),),
    )
    if fits:
        loader.check_versions(library)
        return
    with pytest.raises(ImportError) as caught:
        loader.check_versions(library)
    for part in (
        str(library.path),
        "0.25.3",
        running,
        "/other/libggml-base.so.0",
        "llama-cpp-python==0.3.36",
    ):
        assert part in str(caught.value)


def all_layouts() -> dict[str, str]:
    return {name: loader.layout(name, struct) for name, struct in ffi.STRUCTS.items()}


def test_layout_is_written_as_the_library_writes_it() -> None:
    # sizes by the rules of the platform's C: see kvgraph.h
    written = "kvg_output:48:struct_size@0,logits@8,embd@16,score@24,n_rows@32,n_written@40"
    assert all_layouts()["kvg_output"] == written


def test_layouts_that_agree() -> None:
    loader.check_layout(Path("lib.so"), ";".join(all_layouts().values()) + ";")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kvg_output:48", "kvg_output:40"),  # another size
        ("embd@16", "embd@24"),  # another offset
        ("embd@16", "hidden@16"),  # another name
        (
            "kvg_output:48:struct_size@0,logits@8,embd@16,score@24,n_rows@32,n_written@40;",
            "",
        ),  # a struct that the library lacks
        ("kvg_output:48", "kvg_new:8:struct_size@0;kvg_output:48"),  # one that we lack
    ],
)
def test_layouts_that_differ(old: str, new: str) -> None:
    reported = (";".join(all_layouts().values()) + ";").replace(old, new)
    with pytest.raises(
        ImportError, match=r"lib\.so is of another version of pykvgraph: its kvg_(output|new) is"
    ):
        loader.check_layout(Path("lib.so"), reported)


def test_only_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="Linux only so far; this is win32"):
        loader.load()

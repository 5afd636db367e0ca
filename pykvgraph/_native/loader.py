"""Finds ggml, opens libkvgraph on it, and makes sure that they belong together.

libkvgraph is linked against `libggml.so.0` and `libggml-base.so.0` without a path: whichever ggml is in the
process when it is opened serves it. So the one inside the llama-cpp-python package is opened first, by full
path and by the very names that libllama asks for; a ggml that is already mapped (somebody imported llama_cpp
before) is taken as it is. Two copies in a process would be two backend registries, hence the checks here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pykvgraph import env
from pykvgraph._native import ffi

REQUIREMENT = "llama-cpp-python==0.3.36"
INSTALL_GGML = f"pip install --force-reinstall {REQUIREMENT}"
INSTALL_KVGRAPH = "pip install --force-reinstall --no-deps --no-cache-dir pykvgraph"
MAPS = Path("/proc/self/maps")

_OPENMP_FILE = re.compile(r"/libgomp[^/\s]*\.so")
_CUDA_FILE = re.compile(r"lib(?:cudart|cublas\w*|nv\w+|nccl)\.so[\d.]*")  # of NVIDIA
_LIBRARY_FILE = re.compile(r"(libggml(?:-[\w-]+)?|libkvgraph)\.so[\d.]*")


@dataclass(frozen=True)
class Library:
    """libkvgraph, open and checked. had_openmp: a libgomp was there before."""

    lib: ctypes.CDLL
    path: Path
    version: str
    ggml_version_built: str
    ggml_version_running: str
    ggml_paths: tuple[Path, ...]
    had_openmp: bool = False


def load() -> Library:
    """Opens ggml and libkvgraph. Raises ImportError: which file, which version, how to mend it."""
    if not sys.platform.startswith("linux"):
        raise ImportError(f"pykvgraph runs on Linux only so far; this is {sys.platform}")
    directory, maps = find_ggml_directory(), read_maps()
    with env.openmp_spins():
        paths = preload_order(directory, mapped_libraries(maps))
        if any(path.name.startswith("libggml-cuda.") for path in paths):
            env.cuda_kernels_in_order()
        for path in paths:
            open_library(path, INSTALL_GGML)
        path = find_kvgraph()
        lib = open_library(path, INSTALL_KVGRAPH)
    mapped = mapped_libraries(read_maps())
    check_not_doubled(mapped)
    try:
        ffi.declare(lib)
    except AttributeError as error:
        raise ImportError(f"{path} is of another version of pykvgraph: {error}. {mend_kvgraph()}") from error
    library = Library(
        lib=lib,
        path=path,
        version=lib.kvg_version().decode(),
        ggml_version_built=lib.kvg_ggml_version_built().decode(),
        ggml_version_running=lib.kvg_ggml_version_running().decode(),
        ggml_paths=tuple(
            sorted(file for name, files in mapped.items() if name != "libkvgraph" for file in files)
        ),
        had_openmp=has_openmp(maps),
    )
    check_versions(library)
    check_layout(path, lib.kvg_struct_layout().decode())
    return library


def mend_kvgraph() -> str:
    if env.path(env.LIBRARY):
        return f"Build it again, or unset {env.LIBRARY}"
    return f"Run: {INSTALL_KVGRAPH}"


def find_ggml_directory() -> Path:
    """The folder of llama_cpp's libraries, found without importing llama_cpp."""
    override = env.path(env.LLAMA_CPP_LIBRARIES)
    if override:
        if not (override / "libggml-base.so.0").exists():
            raise ImportError(
                f"{env.LLAMA_CPP_LIBRARIES} is {override}, which has no libggml-base.so.0. "
                f"Point it at the lib folder of {REQUIREMENT}, or unset it"
            )
        return override
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError(
            "pykvgraph computes with the ggml inside llama-cpp-python, which is not installed for "
            f"{sys.executable}. Run: pip install {REQUIREMENT}"
        )
    directory = Path(spec.origin).parent / "lib"
    if not (directory / "libggml-base.so.0").exists():
        raise ImportError(
            f"{directory} has no libggml-base.so.0, which {REQUIREMENT} puts there. Run: {INSTALL_GGML}"
        )
    return directory


def preload_order(directory: Path, mapped: dict[str, set[Path]]) -> list[Path]:
    """The ggml files to open, each after what it needs: base, backends, libggml.

    By the name `.so.0`, which is the SONAME: a wheel holds `.so`, `.so.0` and `.so.0.x.y` as three real
    files, and libllama will ask for that one. A library that is mapped already is opened as the file it
    came from.
    """
    backends = sorted(
        path.name.removesuffix(".so.0")
        for path in directory.glob("libggml-*.so.0")
        if path.name != "libggml-base.so.0"
    )
    names = ["libggml-base", *backends, "libggml"]
    return [min(mapped[name]) if mapped.get(name) else directory / f"{name}.so.0" for name in names]


def find_kvgraph() -> Path:
    override = env.path(env.LIBRARY)
    if override:
        if not override.is_file():
            raise ImportError(f"{env.LIBRARY} is {override}, which is no file. Correct it, or unset it")
        return override
    # an editable install has two folders: the source, and where the library was put
    package = sys.modules["pykvgraph"].__path__
    for directory in package:
        path = Path(directory) / "lib" / "libkvgraph.so"
        if path.is_file():
            return path
    raise ImportError(
        f"{Path(package[0]) / 'lib' / 'libkvgraph.so'} is missing: this pykvgraph is a source tree, not an "
        f"installed package. Run pip install . there and start Python elsewhere, or set {env.LIBRARY}"
    )


def open_library(path: Path, install: str) -> ctypes.CDLL:
    """Raises ImportError: what is missing, and what brings it."""
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        mend = f"Run: {install}"
        missing = str(error).partition(":")[0]
        if _CUDA_FILE.fullmatch(missing):
            mend = (
                f"Install CUDA's run-time libraries, of which {missing} is one, or add their folder to "
                "LD_LIBRARY_PATH"
            )
        raise ImportError(f"{path} can't be opened: {error}. {mend}") from error


def read_maps() -> str:
    """/proc/self/maps, where the name of any mapped file may be no text in this locale."""
    return os.fsdecode(MAPS.read_bytes())


def mapped_libraries(maps: str) -> dict[str, set[Path]]:
    """The files of each library ("libggml-cpu") in a process, from the text of its /proc/self/maps."""
    found: dict[str, set[Path]] = {}
    # address, permissions, offset, device, inode, path; the path may hold blanks, and anything but "\n"
    lines = (line.split(maxsplit=5) for line in maps.split("\n"))
    for name in {fields[5].removesuffix(" (deleted)") for fields in lines if len(fields) == 6}:
        match = _LIBRARY_FILE.fullmatch(os.path.basename(name))
        if match:
            found.setdefault(match[1], set()).add(Path(name))
    return found


def has_openmp(maps: str) -> bool:
    """Whether a libgomp is in a process, from the text of its /proc/self/maps."""
    return _OPENMP_FILE.search(maps) is not None


def check_not_doubled(mapped: dict[str, set[Path]]) -> None:
    for name, files in sorted(mapped.items()):
        if len(files) > 1:
            listed = " and ".join(str(path) for path in sorted(files))
            raise ImportError(
                f"{name} is in this process twice: {listed}. Start Python afresh, without what opens the "
                "second (llama_cpp._ggml does)"
            )


def check_versions(library: Library) -> None:
    built, running = library.ggml_version_built, library.ggml_version_running
    if built != running:
        files = ", ".join(str(path) for path in library.ggml_paths)
        raise ImportError(
            f"{library.path} was compiled against ggml {built}, but ggml {running} is in this process: "
            f"{files}. Run: {INSTALL_GGML}; or, to use that ggml: {INSTALL_KVGRAPH}"
        )


def check_layout(path: Path, reported: str) -> None:
    """Compares how the compiler laid out the header's structs with how ctypes does."""
    expected = {name: layout(name, struct) for name, struct in ffi.STRUCTS.items()}
    actual = {part.split(":")[0]: part for part in reported.split(";") if part}
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ImportError(
                f"{path} is of another version of pykvgraph: its {name} is {actual.get(name, 'missing')}, "
                f"expected {expected.get(name, 'none')}. {mend_kvgraph()}"
            )


def layout(name: str, struct: type[ctypes.Structure]) -> str:
    """`struct:size:field@offset,...` as kvg_struct_layout() writes it."""
    fields: Iterable[str] = (f"{field[0]}@{getattr(struct, field[0]).offset}" for field in struct._fields_)
    return f"{name}:{ctypes.sizeof(struct)}:{','.join(fields)}"

"""The library itself, before any model."""

from __future__ import annotations

import ctypes
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import pykvgraph as kvg
from pykvgraph._native import ffi, fork
from pykvgraph._native.ffi import KvgTokenAttr, KvgTokenizeText, KvgTokenText
from pykvgraph._native.library import lib, sized


@pytest.fixture
def info() -> kvg.LibraryInfo:
    return kvg.library_info()


def test_versions(info: kvg.LibraryInfo) -> None:
    assert kvg.__version__ == info.version
    assert re.fullmatch(r"\d+\.\d+\.\d+", info.version)
    assert info.ggml_version_built == info.ggml_version_running
    assert re.fullmatch(r"\d+\.\d+\.\d+", info.ggml_version_running)


def test_library_names_no_backend_and_no_path(info: kvg.LibraryInfo) -> None:
    """It takes the ggml that is in the process, with whatever backends that has, and brings none itself."""
    dynamic = subprocess.check_output(["readelf", "-d", str(info.path)], text=True)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    ours = {name for name in needed if "ggml" in name or "llama" in name}
    assert ours == {"libggml.so.0", "libggml-base.so.0"}
    assert "RUNPATH" not in dynamic
    assert "RPATH" not in dynamic


def test_layout_of_every_struct() -> None:
    """Field by field as the C compiler laid them out."""
    reported = dict(part.split(":", 1) for part in lib().kvg_struct_layout().decode().split(";") if part)
    assert reported.keys() == ffi.STRUCTS.keys()
    for name, struct in ffi.STRUCTS.items():
        size, fields = reported[name].split(":")
        assert int(size) == ctypes.sizeof(struct)
        offsets = dict(field.split("@") for field in fields.split(","))
        assert {field: int(offset) for field, offset in offsets.items()} == {
            field[0]: getattr(struct, field[0]).offset for field in struct._fields_
        }


def test_devices() -> None:
    devices = kvg.devices()
    names = [device.name for device in devices]
    assert len(set(names)) == len(names)
    cpu = next(device for device in devices if device.type == "cpu")
    assert cpu.description
    assert cpu.memory_total > 2**20
    assert all(device.memory_free <= device.memory_total for device in devices)


@pytest.mark.parametrize("index", [-1, 1000, 2**31 - 1, -(2**31)])
def test_no_such_device_index(index: int) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        lib().kvg_device_get(index, ctypes.byref(sized(ffi.KvgDeviceInfo)))


@pytest.mark.parametrize("name", ["Vulkan99", "gpu", "", "no such device"])
def test_unknown_device(name: str, stories: Path) -> None:
    with pytest.raises(kvg.DeviceError) as error:
        kvg.Model(stories, device=name)
    assert "CPU" in str(error.value)  # the message tells what there is


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "no-model.gguf"
    for opener in (kvg.Model, kvg.GgufFile):
        with pytest.raises(FileNotFoundError, match=r"no-model\.gguf"):
            opener(path)


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time " * 100)
    for opener in (kvg.Model, kvg.GgufFile):
        with pytest.raises(kvg.ModelLoadError, match=r"story\.txt"):
            opener(path)


def test_gguf_file(stories: Path) -> None:
    """What the file says, without its weights; afterwards it is closed."""
    with kvg.GgufFile(stories) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 512
        info = file.model_info()
        shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    assert (info.n_layer, info.n_embd, info.n_head, info.n_head_kv, info.n_vocab) == (5, 64, 8, 4, 512)
    assert shapes["token_embd.weight"] == (64, 512)
    assert file.metadata["general.architecture"] == "llama"  # what was read stays
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        file.model_info()


# every function that takes a handle, with NULL for it and for all that it would write to
NULL_CALLS: list[Callable[[], object]] = [
    lambda: lib().kvg_gguf_open(None, None, 0, None),
    lambda: lib().kvg_gguf_get_kv(None, 0, None),
    lambda: lib().kvg_gguf_get_string(None, 0, 0, None, None),
    lambda: lib().kvg_gguf_copy_strings(None, 0, None, 0, None),
    lambda: lib().kvg_gguf_get_tensor(None, 0, None),
    lambda: lib().kvg_gguf_check_model(None, None),
    lambda: lib().kvg_model_load(None, None, None),
    lambda: lib().kvg_model_get_info(None, None),
    lambda: lib().kvg_context_new(None, None, None),
    lambda: lib().kvg_decode(None, None, None),
    lambda: lib().kvg_kv_get_info(None, None),
    lambda: lib().kvg_kv_seq_rm(None, 0, 0, 0),
    lambda: lib().kvg_kv_seq_cp(None, 0, 0, 0, 0),
    lambda: lib().kvg_kv_seq_keep(None, 0),
    lambda: lib().kvg_kv_seq_add(None, 0, 0, 0, 0),
    lambda: lib().kvg_kv_seq_div(None, 0, 0, 0, 1),
    lambda: lib().kvg_kv_seq_pos_min(None, 0, None),
    lambda: lib().kvg_kv_seq_pos_max(None, 0, None),
    lambda: lib().kvg_kv_seq_bounds(None, None, None, None),
    lambda: lib().kvg_kv_seq_count(None, 0, 0, -1, None, None),
    lambda: lib().kvg_kv_hold(None, 0, 0, -1, None),
    lambda: lib().kvg_kv_attach(None, 1, 0, -1),
    lambda: lib().kvg_kv_release(None, 1),
    lambda: lib().kvg_kv_clear(None, 0),
    lambda: lib().kvg_kv_defrag(None, 0),
    lambda: lib().kvg_kv_update(None, None),
    lambda: lib().kvg_kv_take_stats(None, None),
    lambda: lib().kvg_kv_cells(None, 0, None, None, None, None, None),
    lambda: lib().kvg_kv_read(None, 0, 0, None, 0),
    lambda: lib().kvg_device_get(0, None),
    lambda: lib().kvg_specials_new(None, 0, KvgTokenAttr(), KvgTokenText(), None),
    lambda: lib().kvg_specials_encode(None, None, KvgTokenizeText(), None, 0, 0, None, None, 0, None),
]


@pytest.mark.parametrize("index", range(len(NULL_CALLS)))
def test_null_is_an_error(index: int) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        NULL_CALLS[index]()


def test_freeing_null_is_nothing() -> None:
    lib().kvg_gguf_free(None)
    lib().kvg_model_free(None)
    lib().kvg_context_free(None)


@pytest.mark.parametrize("size", [0, 1, 2**63])
def test_struct_of_another_size(size: int) -> None:
    info = ffi.KvgDeviceInfo(struct_size=size)
    with pytest.raises(kvg.InvalidArgumentError, match="size"):
        lib().kvg_device_get(0, ctypes.byref(info))


def test_message_is_of_the_failing_thread() -> None:
    messages: dict[str, bytes] = {}

    def fail() -> None:
        with pytest.raises(FileNotFoundError):
            kvg.GgufFile("elsewhere.gguf")
        messages["there"] = lib().kvg_last_error()

    with pytest.raises(FileNotFoundError):
        kvg.GgufFile("here.gguf")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    messages["here"] = lib().kvg_last_error()
    assert b"elsewhere.gguf" in messages["there"]
    assert b"here.gguf" in messages["here"]
    assert b"elsewhere" not in messages["here"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cached properties have no locks any more")
def test_a_child_gets_new_locks_for_all_cached_properties() -> None:
    """Or it waits for ever for a thread that was reading one when os.fork() came."""
    names = [found.name for found in pkgutil.walk_packages(kvg.__path__, "pykvgraph.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    cached = [
        value
        for kind in kinds
        if kind.__module__ in names
        for value in vars(kind).values()
        if isinstance(value, functools.cached_property)
    ]
    assert len(cached) > 5
    assert [each.attrname for each in cached if each not in fork._with_locks] == []

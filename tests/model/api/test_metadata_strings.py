"""Strings of a file's metadata: byte by byte what the file has, however many there are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf_bytes import STRING
from support.gguf_parts import take_apart
from support.models import TINY, ModelSpec

import pykvgraph as kvg
from pykvgraph._native.library import lib

ModelFile = Callable[[ModelSpec], Path]
# bytes that begin and end characters, and whole ones; no NUL, which no file may have
BYTES = st.lists(st.sampled_from([*range(1, 256), *"é🦊a".encode() * 9]), max_size=5).map(bytes)


@given(strings=st.lists(BYTES, max_size=8), one=BYTES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_strings_are_the_files(
    model_file: ModelFile, tmp_path: Path, strings: list[bytes], one: bytes
) -> None:
    parts = take_apart(model_file(TINY).read_bytes())
    parts.set("test.many", STRING, [*strings])
    parts.set("test.one", STRING, one)
    path = tmp_path / "model.gguf"
    parts.raw().write(path)
    with kvg.GgufFile(path) as file:
        assert file.metadata["test.many"] == [each.decode("utf-8", "replace") for each in strings]
        assert file.metadata["test.one"] == one.decode("utf-8", "replace")


def test_nothing_is_written_without_room(model_file: ModelFile, tmp_path: Path) -> None:
    parts = take_apart(model_file(TINY).read_bytes())
    parts.set("test.many", STRING, [b"one", b"", b"three"])
    parts.raw().write(tmp_path / "model.gguf")
    index = [key.name for key in parts.keys].index(b"test.many")
    size, data = ctypes.c_uint64(), ctypes.create_string_buffer(b"-" * 20, 20)
    with kvg.GgufFile(tmp_path / "model.gguf") as file:

        def copy(index: int, room: int) -> bytes:
            file._handle.call(lib().kvg_gguf_copy_strings, index, data, room, ctypes.byref(size))
            return data.raw

        assert (copy(index, 10), size.value) == (b"-" * 20, 11)
        assert (copy(index, 11), size.value) == (b"one\0\0three\0" + b"-" * 9, 11)
        n_keys = lib().kvg_gguf_n_kv
        with pytest.raises(kvg.InvalidArgumentError, match="no key has index"):
            copy(file._handle.call(n_keys), 20)

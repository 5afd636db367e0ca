"""Files that are no model, or damaged ones: a typed error each time, and the process lives."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support import chance
from support.gguf_bytes import ARRAY, FLOAT32, STRING, UINT32, RawGguf, text
from support.models import N_VOCAB, TINY, ModelSpec, WeightType, add_metadata, add_vocabulary, random_tensors

import pykvgraph as kvg

ModelFile = Callable[[ModelSpec], Path]
Tensors = dict[str, np.ndarray[Any, Any]]
REFUSED = (kvg.ModelLoadError, kvg.UnsupportedError)


def refused(path: Path) -> str:
    with pytest.raises(REFUSED) as info:
        kvg.Model(path, device="cpu")
    return str(info.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        kvg.Model(tmp_path / "nothing.gguf")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="Not a directory"):
        kvg.Model(tmp_path / "file" / "model.gguf")
    with pytest.raises(kvg.ModelLoadError, match="regular file"):
        kvg.Model(tmp_path)
    with pytest.raises(kvg.ModelLoadError, match="regular file"):
        kvg.Model("/dev/null")
    with pytest.raises(kvg.InvalidArgumentError):
        kvg.Model("a\0b")


def test_what_is_there_and_cannot_be_opened(tmp_path: Path) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    with pytest.raises(kvg.ModelLoadError, match=r"loop\.gguf.*symbolic links"):
        kvg.Model(loop)
    with pytest.raises(kvg.ModelLoadError, match="too long"):
        kvg.Model(tmp_path / ("a" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.touch(0o000)
    with pytest.raises(kvg.ModelLoadError, match=r"secret\.gguf.*Permission"):
        kvg.Model(path)


def test_no_descriptors_left(tmp_path: Path) -> None:
    """The file may be all right: it is the system that refuses."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # the next one would have this number
    try:
        with pytest.raises(kvg.DeviceError, match=r"model\.gguf.*open files"):
            kvg.GgufFile(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_path_may_be_bytes(stories: Path) -> None:
    """os.fsencode takes it, and so do the file and the model."""
    path: Any = os.fsencode(stories)
    with kvg.GgufFile(path) as file, kvg.Model(path, device="cpu") as model:
        assert file.path == model.path == stories
        assert file.metadata == model.metadata


@pytest.mark.parametrize("path", [None, 5, "a\0b", ["model.gguf"]])
def test_what_is_no_path(path: Any) -> None:
    for opened in (kvg.GgufFile, kvg.Model):
        with pytest.raises(kvg.InvalidArgumentError, match="path"):
            opened(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"G",
        b"GGUF",
        b"GGUF" + bytes(4),
        b"GGML" + bytes(60),
        b"\x7fELF" + bytes(60),
        b"text, not a model\n" * 99,
    ],
    ids=repr,
)
def test_what_is_no_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert "model.gguf" in refused(path)


@pytest.mark.parametrize(
    ("data", "kind", "remedy"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n", "Git LFS", "git lfs pull"),
        (b"<!DOCTYPE html>\n<html>Sign in</html>", "web page", "download it again"),
        (b"\xef\xbb\xbf\r\n <HTML><body>404</body></HTML>", "web page", "download it again"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "web page", "download it again"),
        (b'{"error": "Repository not found"}', "JSON text", "download the GGUF"),
        (struct.pack("<Q", 40) + b'{"a":{"dtype":"F32"}}' + bytes(60), "safetensors", "convert_hf_to_gguf"),
        (b"PK\x03\x04" + bytes(60), "zip archive", "convert_hf_to_gguf"),
        (b"\x80\x02}q\x00." + bytes(60), "pickle", "convert_hf_to_gguf"),
        (b"\x80\x05\x95" + bytes(60), "pickle", "convert_hf_to_gguf"),
        (b"\x1f\x8b\x08" + bytes(60), "gzip", "unpack"),
        (b"\x28\xb5\x2f\xfd" + bytes(60), "zstd", "unpack"),
        (b"tjgg\x03\0\0\0" + bytes(60), "before GGUF", "as a GGUF"),
        (bytes(100_000), "nothing but zeros", "download it again"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_it_is_instead(tmp_path: Path, data: bytes, kind: str, remedy: str) -> None:
    """What people find in a model's place, by its name and with what to do."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    message = refused(path)
    assert message.startswith(f"{path} is not a GGUF file: it ")
    assert kind in message
    assert remedy in message


def test_truncated_anywhere(model_file: ModelFile, tmp_path: Path) -> None:
    """At every length from nothing to one byte short."""
    data = model_file(TINY).read_bytes()
    path = tmp_path / "short.gguf"
    for length in [*range(0, 512, 7), *range(512, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        refused(path)


def raw_model() -> RawGguf:
    raw = RawGguf()
    raw.key("general.architecture", STRING, text("llama"))
    return raw


def huge_count(raw: RawGguf) -> None:
    raw.n_tensors = 2**62


def huge_keys(raw: RawGguf) -> None:
    raw.n_keys = 2**62


def huge_string(raw: RawGguf) -> None:
    raw.keys.append(text("general.name") + struct.pack("<IQ", STRING, 2**63))


def huge_array(raw: RawGguf) -> None:
    raw.key("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", FLOAT32, 2**61))


def nested_array(raw: RawGguf) -> None:
    raw.key("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", ARRAY, 1))


def unknown_kind(raw: RawGguf) -> None:
    raw.key("general.name", 99, bytes(8))


def key_twice(raw: RawGguf) -> None:
    raw.key("general.architecture", STRING, text("llama"))


def tensor_twice(raw: RawGguf) -> None:
    for _ in range(2):
        raw.tensor("token_embd.weight", (8, 4))
    raw.data = bytes(256)


def nul_in_key(raw: RawGguf) -> None:
    raw.key(b"general\0name", UINT32, bytes(4))


def nul_in_tensor_name(raw: RawGguf) -> None:
    raw.tensor(b"token\0embd", (8, 4))
    raw.data = bytes(256)


def zero_dimension(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (8, 0))


def no_dimension(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", ())


def five_dimensions(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (2, 2, 2, 2, 2))
    raw.data = bytes(256)


def overflowing_shape(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (2**33, 2**33))


def negative_shape(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (2**64 - 8, 4))


def offset_beyond_file(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (8, 4), offset=2**40)
    raw.data = bytes(128)


def offset_that_wraps(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (8, 4), offset=2**64 - 32)
    raw.data = bytes(128)


def data_cut_short(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (8, 4))
    raw.data = bytes(127)


def unknown_tensor_type(raw: RawGguf) -> None:
    raw.tensor("token_embd.weight", (8, 4), kind=1000)
    raw.data = bytes(256)


def odd_alignment(raw: RawGguf) -> None:
    raw.key("general.alignment", UINT32, struct.pack("<I", 3))


def zero_alignment(raw: RawGguf) -> None:
    raw.key("general.alignment", UINT32, struct.pack("<I", 0))


def later_version(raw: RawGguf) -> None:
    raw.version = 99


DAMAGES = [
    huge_count,
    huge_keys,
    huge_string,
    huge_array,
    nested_array,
    unknown_kind,
    key_twice,
    tensor_twice,
    nul_in_key,
    nul_in_tensor_name,
    zero_dimension,
    no_dimension,
    five_dimensions,
    overflowing_shape,
    negative_shape,
    offset_beyond_file,
    offset_that_wraps,
    data_cut_short,
    unknown_tensor_type,
    odd_alignment,
    zero_alignment,
    later_version,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_directory(tmp_path: Path, damage: Callable[[RawGguf], None]) -> None:
    raw = raw_model()
    damage(raw)
    path = raw.write(tmp_path / "raw.gguf")
    assert "raw.gguf" in refused(path)
    with pytest.raises(REFUSED), kvg.GgufFile(path) as file:
        file.model_info()


def write(path: Path, arch: str, tensors: Tensors, **keys: object) -> Path:
    """TINY with other tensors, and keys that replace those of the same name (None: left out)."""
    writer = gguf.GGUFWriter(path, arch)
    add_metadata(writer, TINY)
    add_vocabulary(writer)
    for name, value in keys.items():
        key = name.replace("__", ".")
        for part in writer.kv_data:
            part.pop(key, None)
        if value is not None:
            add_key(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        float: writer.add_float32,
        bool: writer.add_bool,
        list: writer.add_array,
        int: writer.add_int64,
    }
    adders[type(value)](key, value)


def test_the_hand_written_model_runs(tmp_path: Path) -> None:
    """Else every refusal below could have another reason."""
    kvg.Model(write(tmp_path / "good.gguf", "llama", random_tensors(TINY)), device="cpu").close()


@pytest.mark.parametrize("arch", ["", "no-such-arch", "llama\u2581", "LLAMA"])
def test_unknown_architecture(tmp_path: Path, arch: str) -> None:
    path = write(tmp_path / "model.gguf", "llama", random_tensors(TINY), general__architecture=arch)
    refused(path)


@pytest.mark.parametrize("missing", [name for name in random_tensors(TINY) if name != "output.weight"])
def test_missing_tensor(tmp_path: Path, missing: str) -> None:
    tensors = random_tensors(TINY)
    del tensors[missing]
    assert missing in refused(write(tmp_path / "model.gguf", "llama", tensors))


@pytest.mark.parametrize("name", list(random_tensors(replace(TINY, rope_factors=True))))
@pytest.mark.parametrize("change", ["rows", "columns", "extra dimension"])
def test_wrong_shape(tmp_path: Path, name: str, change: str) -> None:
    tensors: Tensors = dict(random_tensors(replace(TINY, rope_factors=True)))
    tensor = tensors[name]
    if change == "extra dimension":
        tensor = np.stack([tensor, tensor])
    else:
        axis = 0 if change == "rows" else tensor.ndim - 1
        tensor = np.concatenate([tensor, tensor], axis=axis)
    tensors[name] = np.ascontiguousarray(tensor)
    assert name in refused(write(tmp_path / "model.gguf", "llama", tensors))


NUMBERS = [
    "llama__block_count",
    "llama__context_length",
    "llama__embedding_length",
    "llama__feed_forward_length",
    "llama__attention__head_count",
    "llama__attention__head_count_kv",
    "llama__rope__dimension_count",
]
NEEDED = [
    "llama__block_count",
    "llama__embedding_length",
    "llama__attention__head_count",
    "llama__attention__layer_norm_rms_epsilon",
    "general__architecture",
]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 3, 2**31, 2**62, "many", 1.5, [1, 2, 3], True], ids=repr)
def test_key_of_a_wrong_value_or_type(tmp_path: Path, key: str, value: object) -> None:
    """Nothing but TINY's own numbers fits its tensors; only the context length is anybody's choice."""
    path = write(tmp_path / "model.gguf", "llama", random_tensors(TINY), **{key: value})
    if key == "llama__context_length" and value == 3:
        kvg.Model(path, device="cpu").close()
    else:
        refused(path)


@pytest.mark.parametrize("key", NEEDED)
def test_missing_key(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "model.gguf", "llama", random_tensors(TINY), **{key: None})
    assert key.split("__")[-1] in refused(path)


@pytest.mark.parametrize("value", ["big", [1.0], float("nan"), -1.0, float("inf")], ids=repr)
@pytest.mark.parametrize("key", ["llama__rope__freq_base", "llama__attention__layer_norm_rms_epsilon"])
def test_floats_that_can_not_be(tmp_path: Path, key: str, value: object) -> None:
    refused(write(tmp_path / "model.gguf", "llama", random_tensors(TINY), **{key: value}))


@pytest.mark.parametrize("key", ["tokenizer__ggml__tokens", "tokenizer__ggml__model"])
def test_model_without_a_tokenizer_decodes_all_the_same(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "model.gguf", "llama", random_tensors(TINY), **{key: None})
    with kvg.Model(path, device="cpu") as model:
        assert model.n_vocab == N_VOCAB
        with pytest.raises((kvg.ModelLoadError, kvg.UnsupportedError)):
            _ = model.tokenizer


FUZZ = """
import random, sys
from pathlib import Path
import numpy as np
import pykvgraph as kvg

source, target, first, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
original, n_directory = source.read_bytes(), int(sys.argv[5])
loaded = 0
for seed in range(first, first + count):
    print("seed", seed, flush=True)
    rng, data = random.Random(seed), bytearray(original)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(n_directory)
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 8] = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]).to_bytes(8, "little")
        else:
            del data[at : at + rng.randint(1, 64)]
    target.write_bytes(data)
    try:
        with kvg.Model(target, device="cpu") as model, kvg.Context(
            model, n_ctx=16, n_threads=1, n_threads_batch=1
        ) as ctx:
            batch = kvg.Batch()
            batch.extend([1, 2, 3], 0)
            ctx.decode(batch)
            model.metadata
            loaded += 1
    except kvg.KVGraphError:
        pass
print("loaded", loaded)
"""


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_damage_never_kills_the_process(model_file: ModelFile, tmp_path: Path, first: int) -> None:
    """Bytes of the directory changed, inserted and cut, in a process of its own: 50 files each."""
    source = model_file(replace(TINY, weights=WeightType.F16))
    n_directory = gguf.GGUFReader(source).data_offset
    first = chance.number(first)
    arguments = [str(source), str(tmp_path / "damaged.gguf"), str(first), "50", str(n_directory)]
    run = subprocess.run(
        [sys.executable, "-c", FUZZ, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stdout[-100:] + run.stderr[-2000:]
    assert run.stdout.splitlines()[-1].startswith("loaded")

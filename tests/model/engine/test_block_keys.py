"""Keys of blocks are alike in every process; the digest of a file is remembered; keys alone prove nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

import pykvgraph as kvg
from pykvgraph.model import file_digest
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex

IDS = array("i", [7, 0, 31999, 5] * 16)


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_the_key_of_a_block_is_what_the_formula_says() -> None:
    """SHA256("kvgraph-block-1\\0" || parent's key || kind || token ids, 32 bits little-endian)."""
    root = bytes(range(32))
    tokens = struct.pack("<32i", *IDS[:32])
    first = sha256(b"kvgraph-block-1\0" + root + b"\0" + tokens)
    assert block.key(root, tokens) == first
    assert block.key(first, tokens) == sha256(b"kvgraph-block-1\0" + first + b"\0" + tokens)


def test_a_node_has_the_key_of_its_text(tiny: kvg.Model) -> None:
    ids = array("i", [token % 250 for token in range(64)])
    with kvg.Context(tiny, n_ctx=64, n_batch=64) as ctx:
        index = PrefixIndex(ctx.kv)
        batch = kvg.Batch()
        batch.extend(ids, 0)
        ctx.decode(batch)
        last = index.extend(index.attach(index.find(ids, 0), 0), ids, 64, 0)
        root = block.root_key(ctx)
        assert last.key(root) == block.key(block.key(root, ids[:32].tobytes()), ids[32:].tobytes())


def test_every_process_makes_the_same_keys(stories: Path) -> None:
    program = (
        "import sys, pykvgraph as kvg; from pykvgraph.prefix import block\n"
        "with kvg.Model(sys.argv[1], device='cpu') as model, kvg.Context(model, n_ctx=64) as ctx:\n"
        "    print(block.key(block.root_key(ctx, b'salt'), bytes(128)).hex())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-I", "-c", program, str(stories)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    with kvg.Model(stories, device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        assert runs == [block.key(block.root_key(ctx, b"salt"), bytes(128)).hex()] * 2


def test_the_root_depends_on_file_types_and_salt(stories: Path, tiny: kvg.Model) -> None:
    def root(model: kvg.Model, salt: bytes = b"", **options: str) -> bytes:
        with kvg.Context(model, n_ctx=64, **options) as ctx:  # type: ignore[arg-type]
            return block.root_key(ctx, salt)

    with kvg.Model(stories, device="cpu") as model:
        roots = [
            root(model),
            root(model, b"a"),
            root(model, type_k="f32"),
            root(model, type_v="f32"),
            root(tiny),
        ]
        assert len(set(roots)) == 5
        assert root(model) == roots[0]


def test_a_file_is_read_once_for_its_digest(
    stories: Path, tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known again by device, inode, size and time; what changes any of these is read again."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(stories, path)
    expected = sha256(sha256(path.read_bytes()))
    with kvg.Model(path, device="cpu") as model:
        assert file_digest.file_digest(model) == expected
        with monkeypatch.context() as patch:
            patch.setattr(file_digest, "_digest_of", lambda path: pytest.fail("it was read again"))
            assert file_digest.file_digest(model) == expected
        stored = cache_home / "pykvgraph" / "digests.json"
        assert len(json.loads(stored.read_text())) == 1
        stored.write_text("no JSON")
        assert file_digest.file_digest(model) == expected
        os.utime(path, (1, 1))
        assert file_digest.file_digest(model) == expected
        assert len(json.loads(stored.read_text())) == 2


def test_two_texts_with_one_key_share_nothing(tiny: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if SHA-256 were broken: every block has the same key."""
    monkeypatch.setattr(block, "key", lambda parent, tokens: bytes(32))
    prompts = [[n + 1] * 70 for n in range(3)]
    with kvg.Engine(tiny, n_ctx=512, n_seq_max=2) as engine:
        params = kvg.SamplingParams(max_tokens=1)
        hits = [engine.submit(prompt, params).result(60).n_cached for prompt in [*prompts, prompts[0]]]
    assert hits == [0, 0, 0, 69]

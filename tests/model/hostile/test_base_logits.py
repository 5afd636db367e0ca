"""Damaged and malicious files of base logits: a typed error, and no more memory than the file has bytes."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from support import chance
from support.damage import damage

from pykvgraph.demos.base_logits import BaseFile, BaseWriter
from pykvgraph.demos.perplexity import ChunkRows, Chunks, Logits
from pykvgraph.errors import KVGraphError, StateError

N_VOCAB, N_CTX, N_CHUNKS = 11, 9, 3
N_ROWS = 4
CHUNKS = Chunks(np.random.default_rng(1).integers(0, N_VOCAB, (N_CHUNKS, N_CTX)).astype(np.int32), 1)
LOGITS = np.random.default_rng(2).normal(size=(N_CHUNKS, N_ROWS, N_VOCAB)).astype(np.float32)


def rows_of(logits: Logits, chunk: int, begin: int) -> ChunkRows:
    n = len(logits)
    return ChunkRows(chunk, begin, logits, np.zeros(n, np.float32), np.zeros(n, np.int32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file whose chunks were written in two parts."""
    there = tmp_path / "base"
    with BaseWriter(there, CHUNKS, N_VOCAB) as writer:
        for i, logits in enumerate(LOGITS):
            writer.write(rows_of(logits[:3], i, 0))
            writer.write(rows_of(logits[3:], i, 3))
    return there


def read_all(path: Path) -> list[Logits]:
    with BaseFile(path) as file:
        return [file.read(1 + i % 2 * 2) for _ in range(len(file.chunks.tokens)) for i in range(2)]


def test_what_was_written(path: Path) -> None:
    with BaseFile(path) as file:
        assert np.array_equal(file.chunks.tokens, CHUNKS.tokens)
        assert (file.chunks.bos, file.n_vocab) == (1, N_VOCAB)
        assert np.array_equal(
            np.concatenate([file.read(n) for n in (1, 3, 4, 2, 2)]), LOGITS.reshape(-1, N_VOCAB)
        )


def test_damaged(path: Path) -> None:
    """Every change is noticed, wherever it is."""
    whole, rng = path.read_bytes(), random.Random(chance.seed(5))
    for i in range(2000 // chance.SHARE):
        changed = damage(rng, whole, 64)
        if changed == whole:
            continue
        path.write_bytes(changed)
        with pytest.raises(StateError):
            read_all(path)
            pytest.fail(f"change {i} was not noticed")


def test_every_length(path: Path) -> None:
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(StateError):
            read_all(path)


@pytest.mark.parametrize(
    "sizes",
    [
        (2**31 - 1, 2**31 - 1, 2**31 - 1),
        (N_CTX, 2**31 - 1, N_CHUNKS),
        (2**26, N_VOCAB, 1),
        (0, 0, 0),
        (-9, N_VOCAB, -3),
        (N_CTX, -N_VOCAB, N_CHUNKS),
        (2, N_VOCAB, 2**30),
        (N_CTX, 5, N_CHUNKS),
        (N_CTX, N_VOCAB, N_CHUNKS - 1),
    ],
)
def test_sizes_that_lie(path: Path, sizes: tuple[int, int, int]) -> None:
    """With checksums that are right."""
    whole = path.read_bytes()
    head = struct.pack("<8siiii", whole[:8], *sizes, 1) + whole[24:32]
    path.write_bytes(head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + whole[40:])
    with pytest.raises(StateError):
        read_all(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(path: Path, value: float) -> None:
    """Neither written nor, with a checksum that is right, read."""
    bad = LOGITS[0].copy()
    bad[1, 2] = value
    with pytest.raises(KVGraphError, match="not finite"), BaseWriter(path, CHUNKS, N_VOCAB) as writer:
        writer.write(rows_of(bad, 0, 0))
    whole = bytearray(path.read_bytes())
    begin = 40 + CHUNKS.tokens.nbytes
    data = bad.tobytes()
    whole[begin : begin + len(data) + 8] = data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
    path.write_bytes(whole)
    with pytest.raises(StateError, match="not finite"):
        read_all(path)


def test_tokens_that_are_none(path: Path) -> None:
    whole = path.read_bytes()
    tokens = CHUNKS.tokens.copy()
    tokens[1, 1] = N_VOCAB
    head = whole[:24] + struct.pack("<Q", xxhash.xxh3_64_intdigest(tokens.tobytes()))
    head += struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    path.write_bytes(head + tokens.tobytes() + whole[40 + tokens.nbytes :])
    with pytest.raises(StateError, match="not in its vocabulary"):
        read_all(path)

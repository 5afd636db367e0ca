"""Frames between stages: what isn't right is refused before memory is taken for it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from support.streams import pair

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.stream.stage_frame import (
    FrameKind,
    FrameLimits,
    StageFrame,
    batch_bytes,
    noted,
    pack_batch,
    pack_logits,
    receive_frame,
    unpack_batch,
)

N_EMBD, N_VOCAB = 8, 20
LIMITS = FrameLimits(n_batch=4, n_seq_max=3, n_embd=N_EMBD, n_vocab=N_VOCAB)
HEAD = struct.Struct("<8sBIIQ")
MAGIC = b"kvgpipe\1"
BATCH, LOGITS, CALL = FrameKind.BATCH, FrameKind.LOGITS, FrameKind.CALL


def shared_batch() -> kvg.Batch:
    batch = kvg.Batch()
    batch.add(5, 7, (0, 2), logits=True)
    batch.add(6, 8, (2,), checkpoint=True)
    return batch


def through(frame: StageFrame) -> StageFrame:
    one, other = pair()
    frame.send(one)
    return receive_frame(other, LIMITS)


def test_a_batch_comes_as_it_was() -> None:
    hidden = np.random.default_rng(0).normal(size=(2, N_EMBD)).astype(np.float32)
    arrays = shared_batch().snapshot()
    frame = through(pack_batch(arrays, hidden))
    # positions, 3 offsets, 3 ids, states, two marks a token
    assert frame.body.nbytes == 2 * 4 + 3 * 4 + 3 * 4 + 2 * N_EMBD * 4 + 2 * 2 == batch_bytes(2, N_EMBD, 3)
    batch, states = unpack_batch(frame, N_EMBD)
    found = batch.snapshot()
    for name in ("pos", "seq_begin", "seq_id", "logits", "checkpoint"):
        assert np.array_equal(getattr(found, name), getattr(arrays, name)), name
    assert np.array_equal(states, hidden)


def test_logits_and_notes() -> None:
    logits = np.arange(2 * N_VOCAB, dtype=np.float32).reshape(2, N_VOCAB)
    frame = through(pack_logits(logits))
    assert (frame.kind, frame.n) == (LOGITS, 2) and np.array_equal(frame.body.view("<f4"), logits.ravel())
    assert through(noted(CALL, ["seq_rm", [0, 1, -1]])).note() == ["seq_rm", [0, 1, -1]]
    with pytest.raises(kvg.InvalidArgumentError, match="a note to stages has"):
        noted(CALL, "x" * (1 << 16))
    with pytest.raises(kvg.InvalidArgumentError, match="stages can't be told"):
        noted(CALL, ["seq_rm", [np.int64(0), 1, -1]])


@pytest.mark.parametrize(
    ("magic", "kind", "n", "n_ids", "n_bytes"),
    [
        (b"kvgpipe\2", BATCH, 1, 1, batch_bytes(1, N_EMBD)),
        (MAGIC, 0, 0, 0, 0),
        (MAGIC, 99, 0, 0, 0),
        (MAGIC, BATCH, 0, 0, batch_bytes(0, N_EMBD)),
        (MAGIC, BATCH, 5, 5, batch_bytes(5, N_EMBD)),  # over n_batch
        (MAGIC, BATCH, 2, 1, batch_bytes(2, N_EMBD, 1)),  # a token without a sequence
        (MAGIC, BATCH, 2, 7, batch_bytes(2, N_EMBD, 7)),  # over n_seq_max
        (MAGIC, BATCH, 2, 2, batch_bytes(2, N_EMBD) + 1),
        (MAGIC, BATCH, 2, 2, 1 << 60),
        (MAGIC, LOGITS, 1, 0, 4 * N_VOCAB - 4),
        (MAGIC, LOGITS, 5, 0, 20 * N_VOCAB),
        (MAGIC, CALL, 0, 0, (1 << 16) + 1),
        (MAGIC, CALL, 1, 0, 2),
    ],
)
def test_heads_that_can_not_be(magic: bytes, kind: int, n: int, n_ids: int, n_bytes: int) -> None:
    one, other = pair()
    one.flush("stage/head", HEAD.pack(magic, kind, n, n_ids, n_bytes))
    with pytest.raises(kvg.StateError, match=r"no frame of a stage|what can't be"):
        receive_frame(other, LIMITS)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (8, 1),  # the first token's sequences begin behind the first id
        (12, 0),  # a token without sequences
        (12, 3),  # the second one without
        (16, 4),  # past the ids
        (16, -1),
    ],
)
def test_tokens_whose_sequences_are_elsewhere(place: int, value: int) -> None:
    frame = pack_batch(shared_batch().snapshot(), np.zeros((2, N_EMBD), np.float32))
    frame.body[place : place + 4].view("<i4")[0] = value
    with pytest.raises(kvg.StateError, match="no sequences"):
        unpack_batch(frame, N_EMBD)


def test_offsets_whose_differences_are_too_large_for_their_type() -> None:
    """2^31 - 1, -2^31, -1: each difference wraps to a positive one."""
    batch = kvg.Batch()
    for pos in range(4):
        batch.add(5, pos)
    frame = pack_batch(batch.snapshot(), np.zeros((4, N_EMBD), np.float32))
    frame.body[16:36].view("<i4")[:] = [0, 2**31 - 1, -(2**31), -1, 4]
    with pytest.raises(kvg.StateError, match="no sequences"):
        unpack_batch(frame, N_EMBD)


@pytest.mark.parametrize("place", [-1, -4])
def test_marks_that_are_none(place: int) -> None:
    frame = pack_batch(shared_batch().snapshot(), np.zeros((2, N_EMBD), np.float32))
    frame.body[place] = 2
    with pytest.raises(kvg.StateError, match="neither 0 nor 1"):
        unpack_batch(frame, N_EMBD)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 60_000])
def test_notes_that_are_no_json(body: bytes) -> None:
    with pytest.raises(kvg.StateError, match="no JSON"):
        through(StageFrame(CALL, body=np.frombuffer(body, np.uint8))).note()


def test_ends_that_carry_a_cache() -> None:
    one, other = pair()
    one.flush("stage/head", bytes(28))
    with pytest.raises(kvg.TransportError, match="28 bytes"):
        receive_frame(other, LIMITS)


def test_what_is_no_context() -> None:
    nothing: Any = None
    with pytest.raises(kvg.InvalidArgumentError, match=r"pykvgraph\.Context"):
        stream.Pipeline(nothing)

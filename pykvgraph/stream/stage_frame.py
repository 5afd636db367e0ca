"""What stages of a pipeline hand to each other: a head of fixed size, and a body whose size it says."""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import shown
from pykvgraph.context.batch import Batch, BatchArrays
from pykvgraph.errors import InvalidArgumentError, StateError
from pykvgraph.stream.transports.transport import Transport

_MAGIC = b"kvgpipe\1"
# magic, kind, tokens or outputs, sequence ids, bytes of the body
_HEAD = struct.Struct("<8sBIIQ")
_HEAD_KEY = "stage/head"
_BODY_KEY = "stage/body"
_MOST_NOTE = 1 << 16  # bytes
_ROW_BYTES = 14  # of a token in one sequence, beside its hidden state


class FrameKind(IntEnum):
    """What a frame is about."""

    HELLO = 1  # a note: what a stage is
    BATCH = 2  # positions and sequences of tokens, and their hidden states
    LOGITS = 3  # what the last stage makes of them
    CALL = 4  # a note: what to do with the cache
    FAILED = 5  # a note: who couldn't do it, and why
    UNDO = 6  # the batch before is taken back where it was decoded
    END = 7


class StageFrame(NamedTuple):
    """One frame: `n` tokens or outputs, `n_ids` sequence ids."""

    kind: FrameKind
    n: int = 0
    n_ids: int = 0
    body: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def send(self, transport: Transport) -> None:
        """Raises TransportError."""
        transport.flush(_HEAD_KEY, _HEAD.pack(_MAGIC, self.kind, self.n, self.n_ids, self.body.nbytes))
        if self.body.nbytes:
            transport.flush(_BODY_KEY, self.body)

    def note(self) -> Any:
        """What a note says. Raises StateError for what is none."""
        try:
            return json.loads(bytes(self.body))
        except (ValueError, RecursionError):
            raise StateError("a stage has sent a note that is no JSON") from None


class FrameLimits(NamedTuple):
    """What a frame may have at most: of the context that takes it."""

    n_batch: int
    n_seq_max: int
    n_embd: int
    n_vocab: int

    def check(self, frame: StageFrame, n_bytes: int) -> None:
        """Raises StateError for what can't be, before memory is taken for it."""
        if frame.kind == FrameKind.BATCH:
            right = 0 < frame.n <= self.n_batch and frame.n <= frame.n_ids <= frame.n * self.n_seq_max
            right = right and n_bytes == batch_bytes(frame.n, self.n_embd, frame.n_ids)
        elif frame.kind == FrameKind.LOGITS:
            right = frame.n <= self.n_batch and n_bytes == 4 * frame.n * self.n_vocab and not frame.n_ids
        else:
            right = n_bytes <= _MOST_NOTE and not frame.n and not frame.n_ids
        if not right:
            raise StateError(f"a stage has sent what can't be: {frame.kind.name} with {n_bytes} bytes")


def receive_frame(transport: Transport, limits: FrameLimits) -> StageFrame:
    """The next frame. Raises TransportError, and StateError for what is no frame."""
    data = bytearray(_HEAD.size)
    transport.fetch(_HEAD_KEY, data)
    magic, kind, n, n_ids, n_bytes = _HEAD.unpack(data)
    if magic != _MAGIC or kind not in list(FrameKind):
        raise StateError(f"what came over {transport.address} is no frame of a stage of this version")
    frame = StageFrame(FrameKind(kind), n, n_ids)
    limits.check(frame, n_bytes)
    body = np.empty(n_bytes, np.uint8)
    if n_bytes:
        transport.fetch(_BODY_KEY, body)
    return frame._replace(body=body)


def noted(kind: FrameKind, note: object) -> StageFrame:
    """A frame that says something. Raises InvalidArgumentError for what JSON has no form for, or too long."""
    try:
        text = json.dumps(note)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"stages can't be told {shown(note)}: {error}") from None
    body = np.frombuffer(text.encode(), np.uint8)
    if body.nbytes > _MOST_NOTE:
        raise InvalidArgumentError(f"a note to stages has {body.nbytes} bytes, more than {_MOST_NOTE}")
    return StageFrame(kind, body=body)


def batch_bytes(n_tokens: int, n_embd: int, n_ids: int | None = None) -> int:
    """Of the body in which a batch goes from one stage to the next.

    n_ids: of sequences, one for each token unless tokens are shared. The head has 25 bytes more.
    """
    n_shared = 0 if n_ids is None else n_ids - n_tokens
    return (_ROW_BYTES + 4 * n_embd) * n_tokens + 4 * (1 + n_shared)


def pack_batch(arrays: BatchArrays, hidden: npt.NDArray[np.float32]) -> StageFrame:
    """hidden: (n_tokens, n_embd)."""
    parts = (arrays.pos, arrays.seq_begin, arrays.seq_id, hidden.ravel(), arrays.logits, arrays.checkpoint)
    body = np.concatenate([part.view(np.uint8) for part in parts])
    return StageFrame(FrameKind.BATCH, len(arrays.pos), len(arrays.seq_id), body)


def unpack_batch(frame: StageFrame, n_embd: int) -> tuple[Batch, npt.NDArray[np.float32]]:
    """The batch, with tokens that nobody knows here, and the hidden states. Raises StateError."""
    n, n_ids = frame.n, frame.n_ids
    sizes = [4 * n, 4 * (n + 1), 4 * n_ids, 4 * n * n_embd, n, n]
    pos, begin, ids, hidden, logits, checkpoint = np.split(frame.body, np.cumsum(sizes)[:-1])
    seq_begin = begin.view("<i4")
    if seq_begin[0] != 0 or seq_begin[-1] != n_ids or (seq_begin[1:] <= seq_begin[:-1]).any():
        raise StateError("a stage has sent a batch whose tokens have no sequences")
    if max(logits.max(), checkpoint.max()) > 1:
        raise StateError("a stage has sent a batch with marks that are neither 0 nor 1")
    arrays = BatchArrays(
        np.zeros(n, np.int32), pos.view("<i4"), seq_begin, ids.view("<i4"), logits, checkpoint
    )
    return Batch._of(arrays), hidden.view("<f4").reshape(n, n_embd)


def pack_logits(logits: npt.NDArray[np.float32]) -> StageFrame:
    """logits: (n_outputs, n_vocab)."""
    return StageFrame(FrameKind.LOGITS, len(logits), body=logits.ravel().view(np.uint8))

"""A batch as the native library reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from pykvgraph._native.ffi import KvgBatch
from pykvgraph._native.library import sized
from pykvgraph.context.batch import Row, columns


class NativeBatch:
    """The arrays of a kvg_batch, and the struct that names them.

    They stay from decode to decode. A decode of one token leaves a CPU's caches full of weights, so that each
    object that is made after it comes from memory: arrays made anew take 5 % of a decode of 2 ms.

    struct: with the tokens of the last fill(); the caller sets hidden, repair, n_observed and peaks.
    """

    def __init__(self) -> None:
        self._allocate(1, 1)

    def _allocate(self, n_tokens: int, n_ids: int) -> None:
        self._n_tokens, self._n_ids = n_tokens, n_ids
        self._token, self._pos = _array(ctypes.c_int32, n_tokens), _array(ctypes.c_int32, n_tokens)
        self._seq_begin, self._seq_id = _array(ctypes.c_int32, n_tokens + 1), _array(ctypes.c_int32, n_ids)
        self._logits, self._checkpoint = _array(ctypes.c_uint8, n_tokens), _array(ctypes.c_uint8, n_tokens)
        self.struct = sized(
            KvgBatch,
            token=self._token,
            pos=self._pos,
            seq_begin=self._seq_begin,
            seq_id=self._seq_id,
            logits=self._logits,
            checkpoint=self._checkpoint,
        )

    def fill(self, rows: Sequence[Row]) -> None:
        """Raises InvalidArgumentError for more sequence ids than 2^31 - 1."""
        token, pos, seq_begin, seq_id, logits, checkpoint = columns(rows)
        n, n_ids = len(rows), len(seq_id)
        if n > self._n_tokens or n_ids > self._n_ids:
            self._allocate(max(n, self._n_tokens), max(n_ids, self._n_ids))
        self.struct.n_tokens = n
        self._token[:n] = token
        self._pos[:n] = pos
        self._seq_begin[: n + 1] = seq_begin
        self._seq_id[:n_ids] = seq_id
        self._logits[:n] = logits
        self._checkpoint[:n] = checkpoint


def _array(item: Any, n: int) -> Any:
    return (item * n)()

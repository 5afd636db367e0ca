"""A batch as the native library reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from pykvgraph._native.ffi import KvgBatch
from pykvgraph._native.library import sized
from pykvgraph.context.batch import Columns, Row, columns


class NativeBatch:
    """The arrays of a kvg_batch, and the struct that names them.

    They stay from decode to decode. A decode of one token leaves a CPU's caches full of weights, so that each
    object that is made after it comes from memory: arrays made anew take 5 % of a decode of 2 ms.

    struct: with the rows that filled() wrote; the caller sets hidden, repair, n_observed and peaks.
    """

    def __init__(self, n_tokens: int = 1, n_ids: int = 1) -> None:
        """Room for so many tokens, and for so many sequence ids in all."""
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

    def filled(self, rows: Sequence[Row]) -> NativeBatch:
        """With these rows: this batch, or where they don't fit a new one with more room.

        So a batch never has arrays of which only some have grown, whenever Ctrl-C comes or memory ends.
        Raises InvalidArgumentError for more sequence ids than 2^31 - 1.
        """
        these = columns(rows)
        n_tokens, n_ids = max(len(rows), len(self._token)), max(len(these.seq_id), len(self._seq_id))
        batch = self
        if n_tokens > len(self._token) or n_ids > len(self._seq_id):
            batch = NativeBatch(n_tokens, n_ids)
        batch._write(these)
        return batch

    def _write(self, these: Columns) -> None:
        n_tokens = len(these.token)
        self.struct.n_tokens = n_tokens
        self._token[:n_tokens] = these.token
        self._pos[:n_tokens] = these.pos
        self._seq_begin[: n_tokens + 1] = these.seq_begin
        self._seq_id[: len(these.seq_id)] = these.seq_id
        self._logits[:n_tokens] = these.logits
        self._checkpoint[:n_tokens] = these.checkpoint


def _array(item: Any, n: int) -> Any:
    return (item * n)()

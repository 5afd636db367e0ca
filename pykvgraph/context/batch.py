"""The tokens of one decode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pykvgraph._native.fork import renew_lock_in_child
from pykvgraph.checks import INT32_MAX, Integers, flag, integer, integers, several, shown
from pykvgraph.errors import InvalidArgumentError


@dataclass(frozen=True)
class BatchArrays:
    """A batch as kvg_batch's arrays: sequences seq_id[seq_begin[i] : seq_begin[i + 1]] see token i."""

    token: npt.NDArray[np.int32]  # (n,)
    pos: npt.NDArray[np.int32]  # (n,)
    seq_begin: npt.NDArray[np.int32]  # (n + 1,)
    seq_id: npt.NDArray[np.int32]
    logits: npt.NDArray[np.uint8]  # (n,): 1 where the token's row is an output
    checkpoint: npt.NDArray[np.uint8]  # (n,): 1 where the token's sequences get a checkpoint behind it

    def appended(self, pos_max: list[int]) -> set[int]:
        """The sequences with tokens behind these last positions of theirs."""
        positions = np.repeat(self.pos, np.diff(self.seq_begin)).tolist()
        return {s for s, pos in zip(self.seq_id.tolist(), positions, strict=True) if pos > pos_max[s]}


class _Column:
    """An array that grows. The batch, not the column, knows how many of its items are in use."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._items: npt.NDArray[Any] = np.zeros(64, dtype)

    def write(self, at: int, values: npt.ArrayLike, count: int) -> None:
        """Writes `values`, broadcast to `count` items, from index `at` on; the items before `at` stay."""
        if at + count > len(self._items):
            self._grow(at, count)
        self._items[at : at + count] = values

    def put(self, at: int, value: int) -> None:
        """write() of one value, without the arrays that write() makes."""
        if at == len(self._items):
            self._grow(at, 1)
        self._items[at] = value

    def _grow(self, used: int, more: int) -> None:
        grown = np.empty(max(2 * len(self._items), used + more), self._items.dtype)
        grown[:used] = self._items[:used]
        self._items = grown

    def first(self, n: int) -> _Column:
        """A new column with a copy of the first n items."""
        column = _Column(self._items.dtype)
        column.write(0, self._items[:n], n)
        return column

    def copy(self, n: int) -> npt.NDArray[Any]:
        return np.array(self._items[:n])


class Batch:
    """The tokens of one decode: each one's position, the sequences that see it, whether it is an output.

    An output is a token whose logits `Context.logits` returns after the decode.

    A batch only checks that values are from 0 to 2^31 - 1; `Context.decode` checks the rest, such as whether
    a token is in the vocabulary. A batch can be filled again after `clear()`, used by several threads, copied
    and pickled.
    """

    def __init__(self) -> None:
        self._make_lock()
        self._token, self._pos, self._seq_id = (_Column(np.int32) for _ in range(3))
        self._seq_begin = _Column(np.int32)  # one more than tokens; the first is always 0
        self._logits, self._checkpoint = _Column(np.uint8), _Column(np.uint8)
        # number of tokens and of sequence ids; assigned last, so that an interrupt can't leave half a token
        self._n = (0, 0)

    def __len__(self) -> int:
        return self._n[0]

    def clear(self) -> None:
        """Removes every token; the memory is kept for the next ones."""
        with self._change():
            self._n = (0, 0)

    def add(
        self,
        token: int,
        pos: int,
        seq_ids: Iterable[int] = (0,),
        logits: bool = False,
        checkpoint: bool = False,
    ) -> None:
        """Appends one token at position `pos`, which all sequences of `seq_ids` see.

        logits: whether the token is an output. checkpoint: whether its sequences get a checkpoint at pos + 1
        when it has been decoded, as `kv.checkpoint` makes it at their ends. Raises InvalidArgumentError, with
        the batch unchanged, when a number is not an integer from 0 to 2^31 - 1, or seq_ids is empty.
        """
        values = integer(token, "token", 0, INT32_MAX), integer(pos, "pos", 0, INT32_MAX)
        flags = flag(logits, "logits"), flag(checkpoint, "checkpoint")
        ids = _sequences(seq_ids)
        with self._change():
            at, first = self._n
            end = first + len(ids)
            _require_room(end)
            self._token.put(at, values[0])
            self._pos.put(at, values[1])
            for place, seq in enumerate(ids, first):
                self._seq_id.put(place, seq)
            self._seq_begin.put(at + 1, end)
            self._logits.put(at, flags[0])
            self._checkpoint.put(at, flags[1])
            self._n = (at + 1, end)

    def extend(
        self,
        tokens: Integers,
        pos0: int,
        seq_ids: Iterable[int] = (0,),
        logits: Literal["all", "last", False] = "last",
        checkpoints: Integers = (),
    ) -> None:
        """Appends n tokens at the positions pos0 to pos0 + n - 1; all sequences of `seq_ids` see every one.

        logits: which of these tokens are outputs: "all" of them, only the "last", or none (False).
        checkpoints: positions from pos0 + 1 to pos0 + n at which these sequences get a checkpoint, as
        `kv.checkpoint` makes it at their ends. Raises InvalidArgumentError, with the batch unchanged, when a
        number is not an integer from 0 to 2^31 - 1, seq_ids is empty, or a checkpoint is elsewhere.
        """
        ids = integers(tokens, "tokens", 0, INT32_MAX)
        start = integer(pos0, "pos0", 0, INT32_MAX - max(len(ids) - 1, 0))
        if not isinstance(logits, (str, bool)) or logits not in ("all", "last", False):
            raise InvalidArgumentError(f'logits must be "all", "last" or False, got {shown(logits)}')
        wanted: bool | npt.NDArray[np.uint8] = logits == "all"
        if logits == "last":
            wanted = np.zeros(len(ids), np.uint8)
            wanted[-1:] = 1
        marks: bool | npt.NDArray[np.uint8] = False
        if not isinstance(checkpoints, tuple) or checkpoints:
            marks = np.zeros(len(ids), np.uint8)
            marks[integers(checkpoints, "checkpoints", start + 1, start + len(ids)) - start - 1] = 1
        self._append(ids, start, _sequences(seq_ids), wanted, marks)

    def add_each(self, tokens: Integers, positions: Integers, seqs: Integers) -> None:
        """Appends one token for each of several sequences, each at its own position; all are outputs.

        The three have one length. Raises InvalidArgumentError, with the batch unchanged, when they don't, or
        a number is not an integer from 0 to 2^31 - 1.
        """
        ids = integers(tokens, "tokens", 0, INT32_MAX)
        places = integers(positions, "positions", 0, INT32_MAX)
        seq_ids = integers(seqs, "seqs", 0, INT32_MAX)
        if not len(ids) == len(places) == len(seq_ids):
            raise InvalidArgumentError(
                f"one length each: got {len(ids)} tokens, {len(places)} positions, {len(seq_ids)} seqs"
            )
        self._write(ids, places, seq_ids, 1, True, False)

    def snapshot(self) -> BatchArrays:
        """Copies of the arrays, so that a later change to the batch can't disturb a running decode."""
        with self._lock:
            n, n_ids = self._n
            return BatchArrays(
                self._token.copy(n),
                self._pos.copy(n),
                self._seq_begin.copy(n + 1),
                self._seq_id.copy(n_ids),
                self._logits.copy(n),
                self._checkpoint.copy(n),
            )

    @classmethod
    def _of(cls, arrays: BatchArrays) -> Batch:
        """A batch of copies of these arrays, whose lengths fit."""
        batch, n, n_ids = cls(), len(arrays.token), len(arrays.seq_id)
        batch._token.write(0, arrays.token, n)
        batch._pos.write(0, arrays.pos, n)
        batch._seq_begin.write(0, arrays.seq_begin, n + 1)
        batch._seq_id.write(0, arrays.seq_id, n_ids)
        batch._logits.write(0, arrays.logits, n)
        batch._checkpoint.write(0, arrays.checkpoint, n)
        batch._n = (n, n_ids)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: the tokens that the batch has now, in new columns; without the lock."""
        with self._lock:
            state = self.__dict__.copy()
            n, n_ids = self._n
            lengths = {"_token": n, "_pos": n, "_seq_begin": n + 1, "_seq_id": n_ids}
            lengths |= {"_logits": n, "_checkpoint": n}
            state.update({name: state[name].first(length) for name, length in lengths.items()})
        del state["_lock"], state["_changed_under"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_lock()

    def _make_lock(self) -> None:
        self._lock = threading.RLock()
        # the lock of the running change, or None; not _lock itself where a fork interrupted a change
        self._changed_under: object = None
        renew_lock_in_child(self, "_lock")

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Allows one change at a time. A signal handler that interrupts a change gets an error, no wait."""
        lock = self._lock
        with lock:
            if self._changed_under is lock:
                raise InvalidArgumentError("the batch is in use by the call that this one interrupted")
            try:
                self._changed_under = lock
                yield
            finally:
                self._changed_under = None

    def _append(
        self,
        tokens: npt.NDArray[np.int32],
        pos0: int,
        seq_ids: list[int],
        logits: bool | npt.NDArray[np.uint8],
        checkpoint: bool | npt.NDArray[np.uint8],
    ) -> None:
        n = len(tokens)
        each = np.tile(np.array(seq_ids, np.int32), 1 if len(seq_ids) == 1 else n)
        self._write(tokens, np.arange(pos0, pos0 + n), each, len(seq_ids), logits, checkpoint)

    def _write(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64] | npt.NDArray[np.int32],
        seq_ids: npt.NDArray[np.int32],
        width: int,
        logits: bool | npt.NDArray[np.uint8],
        checkpoint: bool | npt.NDArray[np.uint8],
    ) -> None:
        """Appends tokens, of which each has `width` of the sequences, in their order."""
        n = len(tokens)
        with self._change():
            at, first = self._n
            _require_room(first + n * width)
            self._token.write(at, tokens, n)
            self._pos.write(at, positions, n)
            self._seq_id.write(first, seq_ids, n * width)
            self._seq_begin.write(at + 1, first + width * np.arange(1, n + 1), n)
            self._logits.write(at, logits, n)
            self._checkpoint.write(at, checkpoint, n)
            self._n = (at + n, first + n * width)


def _require_room(n_ids: int) -> None:
    if n_ids > INT32_MAX:
        raise InvalidArgumentError(f"the batch would hold over {INT32_MAX} sequence ids: decode in parts")


def _sequences(seq_ids: Iterable[int]) -> list[int]:
    items = several(seq_ids)
    if items is None or isinstance(seq_ids, (str, bytes)):
        raise InvalidArgumentError(f"seq_ids must be several integers, as in (0,), got {shown(seq_ids)}")
    ids = [integer(seq, "seq_ids", 0, INT32_MAX) for seq in items]
    if not ids:
        raise InvalidArgumentError("seq_ids is empty: a token that no sequence sees can't be decoded")
    return ids

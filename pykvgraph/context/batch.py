"""The tokens of one decode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import INT32_MAX, Integers, flag, integer, integers, several, shown
from pykvgraph.errors import InvalidArgumentError

# a token, its position, the sequences that see it, whether it is an output, and whether its sequences get a
# checkpoint behind it
Row = tuple[int, int, tuple[int, ...], bool, bool]


class Columns(NamedTuple):
    """Rows as the columns of kvg_batch: sequences seq_id[seq_begin[i] : seq_begin[i + 1]] see token i."""

    token: Sequence[int]
    pos: Sequence[int]
    seq_begin: Sequence[int]  # one more than tokens
    seq_id: Sequence[int]
    logits: Sequence[bool]
    checkpoint: Sequence[bool]


def columns(rows: Sequence[Row]) -> Columns:
    """Raises InvalidArgumentError for more sequence ids than 2^31 - 1."""
    if len(rows) == 1:
        token, pos, seqs, wanted, mark = rows[0]
        return Columns((token,), (pos,), (0, len(seqs)), seqs, (wanted,), (mark,))
    begin = [0]
    for row in rows:
        begin.append(begin[-1] + len(row[2]))
    if begin[-1] > INT32_MAX:
        raise InvalidArgumentError(f"the batch has over {INT32_MAX} sequence ids: decode in parts")
    return Columns(
        [row[0] for row in rows],
        [row[1] for row in rows],
        begin,
        [seq for row in rows for seq in row[2]],
        [row[3] for row in rows],
        [row[4] for row in rows],
    )


@dataclass(frozen=True)
class BatchArrays:
    """The columns of a batch as arrays."""

    token: npt.NDArray[np.int32]  # (n,)
    pos: npt.NDArray[np.int32]  # (n,)
    seq_begin: npt.NDArray[np.int32]  # (n + 1,)
    seq_id: npt.NDArray[np.int32]
    logits: npt.NDArray[np.uint8]  # (n,): 1 where the token's row is an output
    checkpoint: npt.NDArray[np.uint8]  # (n,): 1 where the token's sequences get a checkpoint behind it


class Batch:
    """The tokens of one decode: each one's position, the sequences that see it, whether it is an output.

    An output is a token whose logits `Context.logits` returns after the decode.

    A batch only checks that values are from 0 to 2^31 - 1; `Context.decode` checks the rest, such as whether
    a token is in the vocabulary. A batch can be filled again after `clear()`, used by several threads, copied
    and pickled.
    """

    def __init__(self) -> None:
        # changed by single operations of a list, which neither threads nor signals interrupt
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        """Removes every token."""
        self._rows.clear()

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
        the batch unchanged, when a number, also pos + 1 of a checkpoint, is not an integer from 0 to
        2^31 - 1, or seq_ids is empty.
        """
        marked = flag(checkpoint, "checkpoint")
        row = (
            integer(token, "token", 0, INT32_MAX),
            integer(pos, "pos", 0, INT32_MAX - marked),
            _sequences(seq_ids),
            flag(logits, "logits"),
            marked,
        )
        self._rows.append(row)

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
        ids = integers(tokens, "tokens", 0, INT32_MAX).tolist()
        start = integer(pos0, "pos0", 0, INT32_MAX - max(len(ids) - 1, 0))
        if not isinstance(logits, (str, bool)) or logits not in ("all", "last", False):
            raise InvalidArgumentError(f'logits must be "all", "last" or False, got {shown(logits)}')
        wanted = [logits == "all"] * len(ids)
        if logits == "last" and ids:
            wanted[-1] = True
        marks = [False] * len(ids)
        end = min(start + len(ids), INT32_MAX)
        for place in integers(checkpoints, "checkpoints", start + 1, end).tolist():
            marks[place - start - 1] = True
        positions = range(start, start + len(ids))
        seqs = repeat(_sequences(seq_ids), len(ids))
        rows = list(zip(ids, positions, seqs, wanted, marks, strict=True))
        self._rows.extend(rows)

    def add_each(self, tokens: Integers, positions: Integers, seqs: Integers) -> None:
        """Appends one token for each of several sequences, each at its own position; all are outputs.

        The three have one length. Raises InvalidArgumentError, with the batch unchanged, when they don't, or
        a number is not an integer from 0 to 2^31 - 1.
        """
        ids = integers(tokens, "tokens", 0, INT32_MAX).tolist()
        places = integers(positions, "positions", 0, INT32_MAX).tolist()
        seq_ids = integers(seqs, "seqs", 0, INT32_MAX).tolist()
        if not len(ids) == len(places) == len(seq_ids):
            raise InvalidArgumentError(
                f"one length each: got {len(ids)} tokens, {len(places)} positions, {len(seq_ids)} seqs"
            )
        rows = [
            (token, pos, (seq,), True, False) for token, pos, seq in zip(ids, places, seq_ids, strict=True)
        ]
        self._rows.extend(rows)

    def rows(self) -> list[Row]:
        """The tokens that the batch has now; a later change to the batch doesn't change the list."""
        return self._rows.copy()

    def snapshot(self) -> BatchArrays:
        """The tokens that the batch has now, as arrays of their own."""
        these = columns(self.rows())
        token, pos, seq_begin, seq_id = (np.array(column, np.int32) for column in these[:4])
        logits, checkpoint = (np.array(column, np.uint8) for column in these[4:])
        return BatchArrays(token, pos, seq_begin, seq_id, logits, checkpoint)

    @classmethod
    def _of(cls, arrays: BatchArrays) -> Batch:
        """A batch of the rows of these arrays, whose lengths fit."""
        batch = cls()
        ends = arrays.seq_begin.tolist()
        seq_ids = arrays.seq_id.tolist()
        sets = [tuple(seq_ids[begin:end]) for begin, end in pairwise(ends)]
        bits = (arrays.logits.astype(bool).tolist(), arrays.checkpoint.astype(bool).tolist())
        batch._rows = list(zip(arrays.token.tolist(), arrays.pos.tolist(), sets, *bits, strict=True))
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: the tokens that the batch has now, in a list of their own."""
        return {**self.__dict__, "_rows": self.rows()}


def _sequences(seq_ids: Iterable[int]) -> tuple[int, ...]:
    items = several(seq_ids)
    if items is None or isinstance(seq_ids, (str, bytes)):
        raise InvalidArgumentError(f"seq_ids must be several integers, as in (0,), got {shown(seq_ids)}")
    ids = tuple([integer(seq, "seq_ids", 0, INT32_MAX) for seq in items])
    if not ids:
        raise InvalidArgumentError("seq_ids is empty: a token that no sequence sees can't be decoded")
    return ids

"""A text is repeated behind itself, to see which of its cells that attends to (KVzip, arXiv:2505.23416)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvgraph.context.batch import Batch
from pykvgraph.context.cell_scores import Peaks, TextCells
from pykvgraph.context.context import Context
from pykvgraph.context.document import require_holdable
from pykvgraph.context.second_reading import require_attention
from pykvgraph.errors import CacheFullError

ASKED = "\n\nThe text above once more, word for word:\n"
N_PART = 256  # tokens that are repeated behind each request (ASKED), and need as many cells meanwhile
_N_BEFORE = 8  # tokens of the part before, which say where a part begins; as the paper has it
_LEAST = 32  # tokens of a part: with fewer, most of what is read are requests


class Repetition:
    """Repeats the text of a sequence, a part at a time. The cells of a part are empty again after it.

    ids: the tokens of the text. n_part: the most of them in a part (n_of_part). `peaks`: the highest
    attention that each position of the text got so far of any repeated token, by head (TextCells.peaks).

    For each part are read: the request (ASKED), the last 8 tokens of the part before, and the tokens of the
    part. They stand behind the text, in the same sequence. A part may take several calls of read(); between
    these its cells stay, until give_up().

    Raises UnsupportedError where it isn't known what tokens attend to, for models with recurrent layers, and
    with windows that haven't kept every position.
    """

    def __init__(self, ctx: Context, seq: int, ids: Sequence[int], n_part: int = N_PART) -> None:
        require_attention(ctx)
        require_holdable(ctx.kv, ctx.swa_full)
        self._ctx = ctx
        self._seq = seq
        self._end = ctx.kv.seq_pos_max(seq) + 1
        self._pending = ctx.kv.pending_token(seq)
        asked, begins = asked_ids(ctx), range(0, len(ids), n_part)
        self._parts = [
            [*asked, *ids[max(p - _N_BEFORE, 0) : p], *ids[p : p + n_part]] for p in reversed(begins)
        ]  # the next one is at the end
        self._n_read = 0  # tokens of the next one
        self.peaks: Peaks = np.zeros((len(TextCells(ctx, seq).positions), 0), np.float32)

    @property
    def n_left(self) -> int:
        """How many tokens are still to be read, those of requests included."""
        return sum(map(len, self._parts)) - self._n_read

    @property
    def n_next(self) -> int:
        """How many tokens are left of the part: the most that read() takes. precondition: n_left > 0"""
        return len(self._parts[-1]) - self._n_read

    def read(self, n: int) -> None:
        """Reads the next n tokens, 1 to n_next. Raises what decode() raises."""
        part = self._parts[-1][self._n_read : self._n_read + n]
        batch = Batch()
        batch.extend(part, self._end + self._n_read, (self._seq,), False)
        self._ctx.decode(batch, observe=len(part), peaks=True)
        found = TextCells(self._ctx, self._seq).peaks()[: len(self.peaks)]
        self.peaks = np.maximum(self.peaks, found) if self.peaks.size else found
        self._n_read += n
        if not self.n_next:
            self._parts.pop()
            self.give_up()

    def give_up(self) -> None:
        """Empties the cells behind the text. A part that was begun will be read from its beginning again."""
        self._n_read = 0
        self._ctx.kv.seq_rm(self._seq, self._end, -1)
        self._ctx.kv.set_pending_token(self._seq, self._pending)


def repeated(ctx: Context, seq: int, ids: Sequence[int]) -> Peaks:
    """Repeats all of a sequence's text, and returns its peaks. Afterwards the sequence is as before.

    It is so after an error, too. Raises CacheFullError when there are too few empty cells, and what
    Repetition and decode() raise.
    """
    n_part = n_of_part(ctx, ctx.kv.seq_pos_max(seq) + 1)
    if n_part < min(_LEAST, len(ids)):
        raise CacheFullError(
            f"to repeat a text takes room for {_LEAST} of its tokens and for what asks for them, at "
            f"positions that the model was trained on, and there is room for {max(n_part, 0)}: forget by "
            "another policy, use a larger n_ctx or a shorter text"
        )
    repetition = Repetition(ctx, seq, ids, n_part)
    try:
        while repetition.n_left:
            repetition.read(min(repetition.n_next, ctx.n_batch))
    finally:
        repetition.give_up()
    return repetition.peaks


def n_of_part(ctx: Context, end: int) -> int:
    """How many tokens a part may have now; below 1: there is no room. end: the text's last position + 1."""
    n_room = min(ctx.kv.n_free, ctx.model.n_ctx_train - end)
    return N_PART + min(n_room - n_cells_of_part(ctx), 0)


def n_cells_of_part(ctx: Context) -> int:
    """How many cells the longest part takes, with its request."""
    return N_PART + len(asked_ids(ctx)) + _N_BEFORE


def asked_ids(ctx: Context) -> list[int]:
    """The tokens of the request; none for a model without a tokenizer."""
    return ctx.model.tokenizer.encode(ASKED, add_special=False) if ctx.model.has_tokenizer else []

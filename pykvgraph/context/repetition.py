"""A text that is read once more, behind itself: which of its cells that takes (KVzip, arXiv:2505.23416)."""

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
N_PART = 256  # tokens that are repeated behind each question: so many cells it takes
_N_BEFORE = 8  # of the part before, which say where the next one begins; as the paper has it
_LEAST = 32  # tokens of a part: below that the questions are most of what is read


class Repetition:
    """The repetition of a sequence's text, a part at a time, each in cells that are empty again behind it.

    ids: the tokens of the text. n_part: the most of them in a part (n_of_part). `peaks`: how much any token
    of the parts so far has attended to each position of the text, and head (TextCells.peaks).

    A part is what asks for it, the last 8 tokens of the part before, and its tokens; it lies behind the text,
    in the same sequence. Several calls of read() may be a part; between them the cells of what is repeated
    stay, until give_up().

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
        ]  # the last is the next one
        self._n_read = 0  # of that
        self.peaks: Peaks = np.zeros((len(TextCells(ctx, seq).positions), 0), np.float32)

    @property
    def n_left(self) -> int:
        """Tokens to be read yet, questions too."""
        return sum(map(len, self._parts)) - self._n_read

    @property
    def n_next(self) -> int:
        """How many tokens read() may read at once: to the end of the part."""
        return len(self._parts[-1]) - self._n_read

    def read(self, n: int) -> None:
        """Reads n tokens of a part. Raises what decode() raises."""
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
        """The sequence ends where the text does; the part that was begun is read from its beginning again."""
        self._n_read = 0
        self._ctx.kv.seq_rm(self._seq, self._end, -1)
        self._ctx.kv.set_pending_token(self._seq, self._pending)


def repeated(ctx: Context, seq: int, ids: Sequence[int]) -> Peaks:
    """Repeats all of a sequence's text; the peaks of it. The sequence is as it was, after an error, too.

    Raises CacheFullError when there are too few empty cells, and what Repetition and decode() raise.
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
    """How many tokens of a text that ends at a position a part may have now; below 1: there is no room."""
    n_room = min(ctx.kv.n_free, ctx.model.n_ctx_train - end)
    return min(N_PART, n_room - len(asked_ids(ctx)) - _N_BEFORE)


def asked_ids(ctx: Context) -> list[int]:
    """The tokens that ask for a part; of a model without a vocabulary none."""
    return ctx.model.tokenizer.encode(ASKED, add_special=False) if ctx.model.has_tokenizer else []

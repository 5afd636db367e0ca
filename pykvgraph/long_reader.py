"""Reading a text that is longer than its context: shift out the old, put neighbours on one position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pykvgraph._native.handles import NotCopied
from pykvgraph.checks import Integers, integer, integers
from pykvgraph.context import Context
from pykvgraph.context_shift import N_KEEP, ContextShift, self_extend
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.feed import Feed
from pykvgraph.types import ShiftReport


class LongReader(NotCopied):
    """Decodes a text of any length into one sequence, batch by batch, as llama.cpp's passkey example does.

    With n_grp above 1 every n_grp neighbours share a position, but for the newest batch (self-extend,
    arXiv:2401.01325). When the cache is full, the positions after the first n_keep that a batch takes are
    given up, the rest moves down, and the holes are closed. `before_shift()` and `on_shift(report)` are
    called before and after that, `on_extend(p0, p1, n_grp)` after positions were grouped.

    A text may come in several reads; what is appended to the sequence between two of them is grouped with the
    newest batch. The reader knows only of its own shifts: after others', or a reset, make a new one.

    Raises InvalidArgumentError for n_keep < 0, n_grp < 1, or a cache with no room for what is kept and one
    batch.
    """

    def __init__(
        self,
        ctx: Context,
        *,
        seq: int = 0,
        n_keep: int = N_KEEP,
        n_grp: int = 1,
        before_shift: Callable[[], None] | None = None,
        on_shift: Callable[[ShiftReport], None] | None = None,
        on_extend: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self._ctx = ctx
        self._seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
        self._n_grp = integer(n_grp, "n_grp", 1)
        n_keep = integer(n_keep, "n_keep", 0)
        n_discard = -(-ctx.n_batch // self._n_grp)  # the positions that a batch takes once it is in groups
        shift = ContextShift(n_keep, n_discard, on_shift)
        self._feed = Feed(ctx, self._seq, shift, before_shift, self._shifted)
        self._on_extend = on_extend
        self._newest: int | None = None  # where the newest batch begins, while its positions are its own
        if n_keep * self._n_grp + ctx.n_batch > ctx.kv.n_cells:
            raise InvalidArgumentError(
                f"{ctx.kv.n_cells} cells can't hold {n_keep} kept positions in groups of {n_grp} and a batch "
                f"of {ctx.n_batch}: use a larger n_ctx, or a smaller n_batch or n_keep"
            )

    def read(self, ids: Integers) -> None:
        """Decodes the tokens after what the sequence holds; no logits. Errors as in Context.decode."""
        n_batch = self._ctx.n_batch
        tokens = integers(ids, "ids", 0)
        for begin in range(0, len(tokens), n_batch):
            part = tokens[begin : begin + n_batch]
            self._extend()  # only the newest batch has positions of its own
            self._feed.append_batch(part)
            self._newest = self._ctx.kv.seq_pos_max(self._seq) + 1 - len(part)

    def make_room(self, n_tokens: int) -> None:
        """Gives up the oldest positions after the kept ones until n_tokens cells are empty.

        Raises InvalidArgumentError for n_tokens < 0, and CacheFullError, with nothing given up, when that
        many can't become empty: by what is kept, or what other sequences hold.
        """
        self._feed.make_room(integer(n_tokens, "n_tokens", 0))

    def _shifted(self, report: ShiftReport) -> None:
        if self._newest is not None and self._newest > report.n_keep:
            self._newest = max(self._newest - report.n_discard, report.n_keep)

    def _extend(self) -> None:
        p0, p1 = self._newest, self._ctx.kv.seq_pos_max(self._seq) + 1
        if self._n_grp > 1 and p0 is not None and p0 < p1:
            self_extend(self._ctx.kv, self._seq, p0, p1, self._n_grp)
            self._newest = None
            if self._on_extend is not None:
                self._on_extend(p0, p1, self._n_grp)


def extended(positions: npt.NDArray[np.int64], p0: int, p1: int, n_grp: int) -> npt.NDArray[np.int64]:
    """Where self_extend(p0, p1, n_grp) puts positions."""
    grouped = p0 + (positions - p0) // n_grp
    after = positions - (p1 - p0) + -(-(p1 - p0) // n_grp)
    return np.where(positions < p0, positions, np.where(positions < p1, grouped, after))

"""Appends tokens to one sequence, for the token loop and the long reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.context.context_shift import ContextShift, make_room
from pykvgraph.context.forgetting import N_RECENT, Forget
from pykvgraph.errors import CacheFullError
from pykvgraph.types import ShiftReport

T = TypeVar("T")
Ids = Sequence[int] | npt.NDArray[np.int32]


class Prefill:
    """Appends tokens to a sequence, each at seq_pos_max + 1, and makes room for them when the cache is full.

    on_full: the policy that gives up cells; before_shift() and after_shift(report) are called before and
    after each context shift. Without on_full, tokens that don't fit raise CacheFullError, and none is
    decoded.

    Raises UnsupportedError where this context can't do what on_full does (Forget.require).

    Other threads may decode other sequences of the context. When another thread takes the cells that
    were just made empty, room is made again.
    """

    def __init__(
        self,
        ctx: Context,
        seq: int,
        on_full: ContextShift | Forget | None,
        before_shift: Callable[[], None] | None = None,
        after_shift: Callable[[ShiftReport], None] | None = None,
    ) -> None:
        if isinstance(on_full, Forget):
            on_full.require(ctx)
        self.ctx = ctx
        self.seq = seq
        self._on_full = on_full
        self._before_shift = before_shift
        self._after_shift = after_shift
        self._batch = Batch()
        self._last: deque[int] = deque(maxlen=N_RECENT)  # of the sequence's tokens, as far as they are known

    def n_room(self) -> int:
        """How many tokens can come before something must be given up."""
        kv, on_full = self.ctx.kv, self._on_full
        return on_full.room(kv, self.seq) if isinstance(on_full, Forget) else kv.n_free

    @property
    def n_own(self) -> int:
        """How many cells the sequence alone has."""
        found = self.ctx.kv.seq_count(self.seq, -1, -1)
        return found.n_cells - found.n_shared

    def append(self, ids: Ids, *, copy_logits: bool) -> LastOutput:
        """Decodes all of `ids`, in as many batches as needed; returns the output of the last token."""
        if isinstance(self._on_full, Forget):
            self.make_room(1)  # its budget may be less than the cache has room for
        if len(ids) == 1:
            try:
                token = int(ids[0])
                last = self.ctx._handle.call(self.ctx._append, self.seq, token, copy_logits)
                self._last.append(token)  # as told() does for several
                return last
            except CacheFullError:
                pass  # the general way below makes room, or raises an error that says what the user can do

        def decode(batch: Batch) -> LastOutput:
            return self.ctx._handle.call(self.ctx._decode_last, batch, copy_logits)

        while True:
            # without a policy all ids must fit; with one, the empty cells are filled before the first shift
            count, last = self._decode(ids, len(ids) if self._on_full is None else 1, "last", decode)
            ids = ids[count:]
            if not len(ids):
                return last

    def append_batch(self, ids: Ids) -> None:
        """Decodes `ids`, at most n_batch, as one batch without outputs."""
        self._decode(ids, len(ids), False, self.ctx.decode)

    def make_room(self, n_tokens: int) -> None:
        """Gives up cells of the sequence until n_tokens find room.

        Raises CacheFullError, with nothing removed, when it has too few cells that may go.
        """
        kv, on_full = self.ctx.kv, self._on_full
        if isinstance(on_full, Forget):
            on_full.make_room(self.ctx, self.seq, n_tokens, list(self._last))
        elif on_full is not None:
            make_room(kv, self.seq, n_tokens, on_full.n_keep, lambda: self._shift(on_full))
        elif n_tokens > kv.n_free:
            raise CacheFullError(
                f"{n_tokens} tokens don't fit: {kv.n_free} of {kv.n_cells} cells are empty. "
                "Use a larger n_ctx, remove tokens (kv.seq_rm, kv.clear), or pass on_full=ContextShift(...)"
            )

    def told(self, ids: Ids) -> None:
        """These are the sequence's last tokens now; of what others append somebody must tell."""
        self._last.extend(map(int, ids[-N_RECENT:]))

    def keep_to_budget(self) -> None:
        """Forgets where the sequence has no cell left of its budget, whether or not the cache is full."""
        if isinstance(self._on_full, Forget) and self._on_full.left(self.ctx.kv, self.seq) < 1:
            self.make_room(1)

    def _shift(self, shift: ContextShift) -> None:
        if self._before_shift is not None:
            self._before_shift()
        report = shift.apply(self.ctx.kv, self.seq)
        if self._after_shift is not None:
            self._after_shift(report)

    def _decode(
        self, ids: Ids, n_cells: int, logits: Literal["last", False], decode: Callable[[Batch], T]
    ) -> tuple[int, T]:
        """Makes n_cells cells empty, and decodes as many of `ids` as fit into one batch and the empty cells.

        Returns how many were decoded, and what decode(batch) returned.
        """
        kv, on_full = self.ctx.kv, self._on_full
        while True:
            self.make_room(n_cells)
            count = min(len(ids), self.ctx.n_batch, max(self.n_room(), n_cells))
            self._batch.clear()
            self._batch.extend(ids[:count], kv.seq_pos_max(self.seq) + 1, (self.seq,), logits=logits)
            try:
                result = decode(self._batch)
                self.told(ids[:count])
                return count, result
            except CacheFullError:
                if on_full is None:
                    raise

"""Reads a text that is longer than the cache: removes tokens, or puts neighbours on one position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import Integers, instance, integer, integers
from pykvgraph.context.context import Context
from pykvgraph.context.context_shift import N_KEEP, ContextShift, self_extend
from pykvgraph.context.forgetting import N_RECENT, N_SINKS, Forget
from pykvgraph.errors import InvalidArgumentError, NotCopied
from pykvgraph.sequence.prefill import Prefill
from pykvgraph.types import ShiftReport


class LongReader(NotCopied):
    """Decodes a text of any length into one sequence, batch by batch, as llama.cpp's passkey example does.

    When the cache is full, the reader does a context shift (ContextShift): it keeps the first n_keep
    positions, removes as many positions after them as one batch takes, and moves the later ones down. It
    calls before_shift() before, and on_shift(report) with a ShiftReport after each.

    With n_grp above 1, every n_grp neighbouring tokens share a position (self_extend, arXiv:2401.01325),
    except those of the newest batch. The reader groups a batch just before it decodes the next one, and then
    calls on_extend(p0, p1, n_grp): the tokens of the positions [p0, p1) were grouped.

    on_full: what the reader does in place of context shifts, whenever the text has reached its budget: it
    forgets (Forget). Positions stay, so there are no groups then; n_keep and the callbacks of shifts aren't
    used.

    A text may be given in several calls of read(). Tokens that the program itself appends to the sequence
    between two calls are grouped with the newest batch. The reader knows only the shifts that it did itself:
    when anything else shifts the sequence or resets the context, make a new reader.

    Raises InvalidArgumentError for n_keep < 0, for n_grp < 1, for groups together with on_full, and when the
    cache (or the budget) is too small for the tokens that are kept and one batch; UnsupportedError for an
    on_full whose policy reads tokens once more where that can't be.
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
        on_full: Forget | None = None,
    ) -> None:
        instance(ctx, Context, "ctx")
        ctx.model._require_whole()
        self._ctx = ctx
        self._seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
        self._n_grp = integer(n_grp, "n_grp", 1)
        n_keep = integer(n_keep, "n_keep", 0)
        n_discard = -(-ctx.n_batch // self._n_grp)  # the positions that a batch takes once it is in groups
        policy = ContextShift(n_keep, n_discard, on_shift) if on_full is None else on_full
        self._prefill = Prefill(ctx, self._seq, policy, before_shift, self._shifted)
        self._on_extend = on_extend
        self._newest: int | None = None  # where the newest batch begins, while its positions are its own
        if on_full is not None:
            _require_budget(on_full, ctx, self._n_grp)
        elif n_keep * self._n_grp + ctx.n_batch > ctx.kv.n_cells:
            raise InvalidArgumentError(
                f"{ctx.kv.n_cells} cells can't hold {n_keep} kept positions in groups of {n_grp} and a batch "
                f"of {ctx.n_batch}: use a larger n_ctx, or a smaller n_batch or n_keep"
            )

    def read(self, ids: Integers) -> None:
        """Decodes the sequence's pending token, if it has one, and the ids at its end, without outputs.

        Raises what Context.decode raises; the batches that were decoded before the error stay.
        """
        n_batch = self._ctx.n_batch
        tokens = integers(ids, "ids", 0)
        pending = self._ctx.kv.pending_token(self._seq)
        if pending is not None and len(tokens):
            self._prefill.append_batch([pending])
        for begin in range(0, len(tokens), n_batch):
            part = tokens[begin : begin + n_batch]
            self._extend()  # only the newest batch has positions of its own
            self._prefill.append_batch(part)
            self._newest = self._ctx.kv.seq_pos_max(self._seq) + 1 - len(part)

    def make_room(self, n_tokens: int) -> None:
        """Does context shifts, or forgets, until n_tokens find room.

        Raises InvalidArgumentError for n_tokens < 0. Raises CacheFullError, with nothing removed, when that
        can't make room for so many, because of the kept positions or the cells of other sequences.
        """
        self._prefill.make_room(integer(n_tokens, "n_tokens", 0))

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


def _require_budget(on_full: Forget, ctx: Context, n_grp: int) -> None:
    instance(on_full, Forget, "on_full")
    if n_grp > 1:
        raise InvalidArgumentError("n_grp: with on_full positions stay as they are: leave one of them out")
    n_cells = min(on_full.budget or ctx.kv.n_cells, ctx.kv.n_cells)
    if N_SINKS + N_RECENT + ctx.n_batch > n_cells:
        raise InvalidArgumentError(
            f"{n_cells} cells can't hold the first {N_SINKS} tokens, the last {N_RECENT} and a batch of "
            f"{ctx.n_batch}: use a larger n_ctx or budget, or a smaller n_batch"
        )


def extended(positions: npt.NDArray[np.int64], p0: int, p1: int, n_grp: int) -> npt.NDArray[np.int64]:
    """The positions that self_extend(..., p0, p1, n_grp) gives to tokens at `positions`."""
    grouped = p0 + (positions - p0) // n_grp
    after = positions - (p1 - p0) + -(-(p1 - p0) // n_grp)
    return np.where(positions < p0, positions, np.where(positions < p1, grouped, after))

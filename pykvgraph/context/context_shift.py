"""What to do when a text is longer than its context: remove old tokens, or put positions closer together.

Both only change positions. K is then rotated to the new positions, so no token is decoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pykvgraph.checks import integer, shown
from pykvgraph.context.context import Context
from pykvgraph.errors import CacheFullError, InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.types import ShiftReport

# the default for how many of a text's first tokens are kept, as in llama.cpp's passkey example
N_KEEP = 32


@dataclass(frozen=True)
class ContextShift:
    """A policy for a full cache: remove old tokens of a sequence, and move the later ones down.

    A shift keeps the positions 0 to n_keep - 1, removes the cells at the next n_discard positions, and
    subtracts n_discard from all positions after them. n_discard None: half of the positions after the kept
    ones. When the sequence has no cell at any of those n_discard positions (a gap), the shift goes on up to
    its first cell and removes that. on_shift: called with a ShiftReport after each shift.

    Source: llama.cpp's examples. Models write well afterwards only if the very first tokens are kept
    ("attention sinks", arXiv:2309.17453). Raises InvalidArgumentError unless n_keep >= 0 and n_discard >= 1.

    A shift is several calls on the cache. Meanwhile no other thread may use this sequence. If it shares cells
    with other sequences, no other thread may decode on the context either: it could take the cells that the
    shift needs for copies.
    """

    n_keep: int
    n_discard: int | None = None
    on_shift: Callable[[ShiftReport], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_keep", integer(self.n_keep, "n_keep", 0))
        if self.n_discard is not None:
            object.__setattr__(self, "n_discard", integer(self.n_discard, "n_discard", 1))
        if self.on_shift is not None and not callable(self.on_shift):
            raise InvalidArgumentError(f"on_shift must be a function, got {shown(self.on_shift)}")

    def apply(self, kv: KVCache, seq: int = 0) -> ShiftReport:
        """Shifts one sequence once, then runs defrag and K-shift (kv.update); returns what was done.

        Raises CacheFullError when the sequence has no position from n_keep on, or when cells that move are
        shared and there are too few empty cells for their copies; UnsupportedError when this model's K can't
        be rotated, or when layers with a window have lost positions that the shift would bring into the
        window again (open the context with swa_full=True, or lower n_discard or n_keep). Nothing is changed
        then. Raises DeviceError as kv.update does.
        """
        n_past = kv.seq_pos_max(seq) + 1
        rest = n_past - self.n_keep
        if rest < 1:
            raise CacheFullError(
                f"sequence {seq} has {n_past} positions and the first {self.n_keep} are to be kept: there is "
                "nothing to give up. Lower n_keep, or use a context with a larger n_ctx"
            )
        n_discard = min(self.n_discard or max(rest // 2, 1), rest)
        seen = kv.seq_count(seq, self.n_keep, self.n_keep + n_discard).n_cells
        if seen == 0 and kv._lost(0, seq) < self.n_keep:  # only a gap, nothing that windows have lost
            view = kv.cells()
            first = int(view.pos[view.seq[:, seq] & (view.pos >= self.n_keep)].min())
            n_discard = first + 1 - self.n_keep
        end = self.n_keep + n_discard
        if not kv.can_shift:
            raise UnsupportedError("this model's K can't be rotated, so its context can't be shifted")
        require_room(kv, seq, end, freed=range(self.n_keep, end))
        _require_windows(kv, seq, self.n_keep, end)
        kv.seq_rm(seq, self.n_keep, end)
        kv.seq_add(seq, end, -1, -n_discard)
        kv.defrag("fill")
        stats = kv.update()
        report = ShiftReport(seq, self.n_keep, n_discard, kv.seq_pos_max(seq) + 1, stats)
        if self.on_shift is not None:
            self.on_shift(report)
        return report


def can_move(ctx: Context) -> bool:
    """Whether a part of a text can be moved while the rest of the text stays as it is.

    Not where K can't be rotated, where layers are recurrent, and where layers have windows, unless swa_full.
    """
    kinds = {"full", "window"} if ctx.swa_full else {"full"}
    return ctx.kv.can_shift and all(group.kind in kinds for group in ctx.kv.groups)


def self_extend(kv: KVCache, seq: int, p0: int, p1: int, n_grp: int) -> int:
    """Puts every n_grp neighbouring positions of [p0, p1) on one position, and closes the gap behind them.

    The token at position p0 + j moves to p0 + j // n_grp; tokens at p1 and later move down, so that they
    follow without a gap. A p1 beyond the sequence's end means its end. Returns the sequence's next position,
    seq_pos_max + 1. K is rotated at the next kv.update or decode.

    Source: "Self-Extend LLM Context Window Without Tuning", arXiv:2401.01325. llama.cpp's passkey example
    calls it for each batch, with [p0, p1) the batch's positions. As in ContextShift, no other thread may use
    the sequence meanwhile.

    Raises InvalidArgumentError unless 0 <= p0 < p1 and n_grp >= 1, and when a position would exceed 2^31 - 1
    in between; CacheFullError as kv.seq_add does. Nothing is changed then.
    """
    if not hasattr(kv, "n_seq_max"):
        raise InvalidArgumentError(f"kv must be a context's kv, got {shown(kv)}")
    seq = integer(seq, "seq", 0, kv.n_seq_max - 1)
    p0 = integer(p0, "p0", 0)
    p1 = integer(p1, "p1", p0 + 1)
    n_grp = integer(n_grp, "n_grp", 1)
    p1 = min(p1, kv.seq_pos_max(seq) + 1)  # beyond is nothing, and p1 + lift might be too large
    if n_grp > 1 and p1 - p0 > 1:
        require_room(kv, seq, max(p0, 1))  # position 0 stays
        # on a multiple of n_grp, dividing is counting: (p0 * n_grp + j) // n_grp = p0 + j // n_grp
        lift = p0 * (n_grp - 1)
        grouped = -(-(p1 - p0) // n_grp)
        kv.seq_add(seq, p0, -1, lift)
        kv.seq_div(seq, p0 + lift, p1 + lift, n_grp)
        kv.seq_add(seq, p1 + lift, -1, p0 + grouped - (p1 + lift))
    return kv.seq_pos_max(seq) + 1


def make_room(kv: KVCache, seq: int, n_tokens: int, n_keep: int, shift: Callable[[], object]) -> None:
    """Calls shift(), which removes positions of `seq` from n_keep on, until n_tokens cells are empty.

    Raises what shift() raises. Raises CacheFullError, before the first shift, when even removing all those
    positions would leave too few empty cells: cells that other sequences see or a hold keeps stay used.
    """
    if kv.n_free >= n_tokens:  # as for nearly every token of a generation
        return
    most = kv.n_free + _own(kv, seq, n_keep, -1)
    if most < n_tokens:
        raise CacheFullError(
            f"{n_tokens} tokens need as many empty cells: of {kv.n_cells}, {most} are empty or hold what "
            f"only sequence {seq} sees from position {n_keep} on. Remove other sequences (kv.seq_rm, "
            "kv.seq_keep), release holds, lower n_keep, or use a larger n_ctx"
        )
    while kv.n_free < n_tokens:
        shift()


def require_room(kv: KVCache, seq: int, first: int, freed: range = range(0), n_more: int = 0) -> None:
    """Raises CacheFullError when cells are going to move and there are too few empty cells for their copies.

    Called before the first of several steps, so that none fails half way. The sequence's cells from position
    `first` on will move. Each of them that another sequence sees or a hold keeps needs an empty cell. The
    sequence's cells at the positions `freed` are removed before, and count as empty where it alone has them.
    n_more: cells that are needed besides.
    """
    n_copies = kv.seq_count(seq, first, -1).n_shared
    if n_copies + n_more == 0:
        return
    n_empty = kv.n_free + _own(kv, seq, freed.start, freed.stop)
    if n_copies + n_more > n_empty:
        raise CacheFullError(
            f"{n_copies} cells of sequence {seq} are shared and would move, which takes copies, and {n_more} "
            f"tokens are decoded besides: there is room for {n_empty}. Remove other sequences "
            "(kv.seq_rm, kv.seq_keep), release holds, or use a larger n_ctx"
        )
    for index, group in enumerate(kv.groups):
        if group.n_fresh:
            _require_room_for_aged(kv, index, seq, first, freed)


def _require_room_for_aged(kv: KVCache, index: int, seq: int, first: int, freed: range) -> None:
    """The same for a group whose rows age: copies of what has aged go where rows are old."""
    view, n_fresh = kv.cells(index), kv.groups[index].n_fresh
    has, n_others = view.seq[:, seq], view.seq.sum(axis=1) + view.held
    copied = has & (view.pos >= first) & (n_others > 1)
    gone = has & (view.pos >= freed.start) & (view.pos < freed.stop) & (n_others == 1)
    empty = (n_others == 0) | gone
    n_old = int(copied.sum()) - min(int(copied[:n_fresh].sum()), int(empty[:n_fresh].sum()))
    n_empty = int(empty[n_fresh:].sum())
    if n_old > n_empty:
        raise CacheFullError(
            f"{n_old} cells of sequence {seq} are shared and would move, which takes copies of what aged: "
            f"there is room for {n_empty}. Remove other sequences (kv.seq_rm, kv.seq_keep), release holds, "
            "or use a larger n_ctx"
        )


def _require_windows(kv: KVCache, seq: int, n_keep: int, end: int) -> None:
    """Raises UnsupportedError when the shift of [n_keep, end) would end with what kv.seq_add refuses."""
    last = kv.seq_pos_max(seq)
    for index, group in enumerate(kv.groups):
        lost = kv._lost(index, seq) if group.window else -1
        kept = min(lost, n_keep - 1) if lost < end else lost - (end - n_keep)  # lost, afterwards
        if kept >= 0 and last - (end - n_keep) - kept < min(last - lost, group.window - 1):
            raise UnsupportedError(
                f"sequence {seq} has lost positions up to {lost} in layers with a window of {group.window}, "
                f"and removing positions {n_keep} to {end - 1} would bring them into the window again: open "
                "the context with swa_full=True, or choose a smaller n_discard"
            )


def _own(kv: KVCache, seq: int, p0: int, p1: int) -> int:
    """Cells in the range that become empty when the sequence stops seeing them."""
    found = kv.seq_count(seq, p0, p1)
    return found.n_cells - found.n_shared

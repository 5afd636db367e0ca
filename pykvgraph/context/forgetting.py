"""Forgetting: of a sequence that has too many cells those go that matter least, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import INT32_MAX, integer, shown
from pykvgraph.context.cell_scores import (
    POLICIES,
    Floats,
    Peaks,
    TextCells,
    checked_composite,
    checked_policy,
)
from pykvgraph.context.context import Context
from pykvgraph.context.context_shift import require_room
from pykvgraph.context.second_reading import read_again, require_policy
from pykvgraph.errors import CacheFullError, InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.composite import Composition
from pykvgraph.kv_cache.composite import compose as compose_cells
from pykvgraph.types import ForgetReport

POLICY = "keydiff"
N_SINKS = 4  # of a text's first tokens, at which heads look that have nothing to look at (arXiv:2309.17453)
N_RECENT = 64  # of its last tokens
N_AT_ONCE = 128  # cells: to know what they are worth takes reading all K

Places: TypeAlias = npt.NDArray[np.int64]


class Composed(NamedTuple):
    """What compose() did. places: from the first position of the span to its last; empty: there is none."""

    report: ForgetReport
    places: range


@dataclass(frozen=True)
class Forget:
    """A policy for a text that goes on: it has `budget` cells, and forgets those that matter least.

    budget: the most cells of a sequence; None: as many as the cache has room for. policy: by what cells are
    chosen: one of context.cell_scores.POLICIES (docs/forgetting.md), but for "kvzip", which reads the whole
    text. on_forget: called with a ForgetReport each time. composite: each head of each layer keeps tokens of
    its own choice, gathered in composite cells; for policies that tell heads apart, not "window".

    128 cells are forgotten at a time, or half of those that may be where that is less. The first 4 and the
    last 64 are not, nor those that a window sees, nor any that other sequences or holds have, too.

    The tokens that stay keep their positions. Where the text would pass the positions that the model was
    trained on, the gaps are closed, and K is rotated (seq_add), if the model can do that.

    Raises InvalidArgumentError for a bad argument. As with ContextShift, no other thread may use the sequence
    meanwhile.
    """

    budget: int | None = None
    policy: str = POLICY
    on_forget: Callable[[ForgetReport], None] | None = None
    composite: bool = False

    def __post_init__(self) -> None:
        checked_composite(self.composite, checked_policy(self.policy, repeats=False))
        if self.budget is not None:
            object.__setattr__(self, "budget", integer(self.budget, "budget", N_SINKS + N_RECENT + 1))
        if self.on_forget is not None and not callable(self.on_forget):
            raise InvalidArgumentError(f"on_forget must be a function, got {shown(self.on_forget)}")

    def require(self, ctx: Context) -> None:
        """Raises UnsupportedError where this can't be done in any text of the context."""
        require_policy(ctx, self.policy)
        if self.composite and any(group.n_fresh for group in ctx.kv.groups):
            raise UnsupportedError(
                "composite cells want rows of one type, and those of this cache have two, by their age: open "
                "the context with one type of K and one of V, or forget whole cells"
            )

    def left(self, kv: KVCache, seq: int) -> int:
        """How many cells the sequence has left of its budget."""
        return (self.budget or kv.n_cells) - kv.seq_count(seq, -1, -1).n_cells

    def room(self, kv: KVCache, seq: int) -> int:
        """How many tokens can come behind the sequence before something must go."""
        return kv.n_free if self.budget is None else min(kv.n_free, self.left(kv, seq))

    def make_room(self, ctx: Context, seq: int, n_tokens: int, last: Sequence[int]) -> None:
        """Forgets until n_tokens more find room.

        last: the ids of the sequence's last tokens, 64 or as many as are known, for policies that decode
        them once more. Raises CacheFullError, with nothing forgotten, when too few cells may be, or when
        gaps are to be closed and there is no room for copies of cells that others have, too;
        UnsupportedError where there are none to be forgotten, and as require_second_reading() does.
        DeviceError while gaps are closed leaves some of them.
        """
        n_missing = n_tokens - self.room(ctx.kv, seq)
        if n_missing <= 0:
            return

        done: list[ForgetReport] = []
        try:
            # as one call: what is empty afterwards is needed for copies
            ctx._handle.together(lambda: self._forget(ctx, seq, n_missing, last, done))
        finally:
            if done and self.on_forget is not None:
                self.on_forget(done[0])

    def _forget(
        self, ctx: Context, seq: int, n_missing: int, last: Sequence[int], done: list[ForgetReport]
    ) -> None:
        """make_room(), which appends a report to `done` once cells are gone."""

        def n_cells(n_most: int) -> int:
            return max(n_missing, n_at_once(n_most))

        def read(n: int) -> None:
            read_again(ctx, seq, last[-n:])

        def check(places: Places, n_gone: int) -> None:
            if self._is_far(ctx, seq, n_gone):
                _require_closing(ctx, seq, places, n_gone)

        if self.composite:
            done.append(compose(ctx, seq, n_cells, self.policy, read, check=check).report)
        else:
            places = chosen(ctx, seq, n_cells, self.policy, read)
            check(places, len(places))
            done.append(drop(ctx.kv, seq, places))
        if self._is_far(ctx, seq, 0):
            close_gaps(ctx, seq)

    def _is_far(self, ctx: Context, seq: int, n_gone: int) -> bool:
        """Whether there is room beyond the trained positions, once n_gone cells are empty.

        False where K can't be rotated.
        """
        n_more = self.room(ctx.kv, seq) + n_gone
        return ctx.kv.can_shift and ctx.kv.seq_pos_max(seq) + 1 + n_more > ctx.model.n_ctx_train


def chosen(
    ctx: Context,
    seq: int,
    n_cells: Callable[[int], int],
    policy: str,
    read: Callable[[int], None] = lambda n: None,
    repeat: Callable[[], Peaks | None] = lambda: None,
    *,
    n_keep: int = N_SINKS,
    shared: bool = False,
) -> Places:
    """The positions of a sequence that matter least, rising, with as many cells as are to go or a few more.

    n_cells(n): how many cells are to go, where n may go; 0: none. read(n): decodes the last n tokens once
    more, and observes what they attend to. repeat(): what the text attends to when it is repeated
    (repetition.repeated). n_keep: so many of the first positions stay, 4 at least. shared: whether cells that
    other sequences or holds have, too, may be forgotten; they aren't empty then.

    Raises what `read` and `repeat` raise; CacheFullError when fewer cells may be forgotten, and
    UnsupportedError as TextCells does.
    """

    def choose() -> Places:
        text, candidates, n_wanted = _candidates(ctx, seq, n_cells, policy, read, repeat, n_keep, shared)
        if n_wanted == 0:
            return np.zeros(0, np.int64)
        return lowest(text, candidates, POLICIES[policy].score(text), n_wanted)

    # cells move, and observed attention goes, when another thread decodes
    return ctx._handle.together(choose)


def lowest(text: TextCells, candidates: npt.NDArray[np.bool_], scores: Floats, n_cells: int) -> Places:
    """Of some of its positions those with the lowest scores, rising, that have n_cells or a few more."""
    numbers = np.flatnonzero(candidates)
    order = numbers[np.argsort(scores[numbers], kind="stable")]
    n = int(np.searchsorted(np.cumsum(text.n_cells[order]), n_cells)) + 1
    return np.sort(text.positions[order[:n]])


def compose(
    ctx: Context,
    seq: int,
    n_cells: Callable[[int], int],
    policy: str,
    read: Callable[[int], None] = lambda n: None,
    repeat: Callable[[], Peaks | None] = lambda: None,
    *,
    check: Callable[[Places, int], None] = lambda places, n_gone: None,
) -> Composed:
    """Forgets cells of a sequence; in the composite cells that stay each head has tokens of its own choice.

    n_cells, read, repeat: as in chosen(). check(places, n_gone): raises before anything is forgotten; so many
    cells of these positions will be empty. All cells that may be forgotten become one span, at the last of
    their positions (kv_cache.composite). Where only one cell of it would stay, it is forgotten, too.
    policy: one that tells heads apart (checked_composite).

    Raises as chosen() does, and what kv_cache.composite.compose() raises.
    """

    def work() -> Composed:
        text, candidates, n_wanted = _candidates(ctx, seq, n_cells, policy, read, repeat, N_SINKS, False)
        check(text.positions[candidates], n_wanted)
        return _composed(ctx, seq, policy, text, candidates, n_wanted)

    return ctx._handle.together(work)  # as in chosen()


def _composed(
    ctx: Context,
    seq: int,
    policy: str,
    text: TextCells,
    candidates: npt.NDArray[np.bool_],
    n_wanted: int,
) -> Composed:
    """compose(), once it is known which cells may go and how many are to."""
    n_kept = int(text.n_cells[candidates].sum()) - n_wanted
    places = text.positions[candidates]
    if n_kept < 2:
        return Composed(drop(ctx.kv, seq, places), range(0))
    of_heads = POLICIES[policy].of_heads
    assert of_heads is not None
    chosen_cells = np.flatnonzero(candidates[text.place_of_cell])
    compositions = []
    for group, layers in zip(text.groups, of_heads(text), strict=True):
        rows = [np.sort(_best(heads[:, chosen_cells], n_kept), axis=1) for heads in layers]
        cells = group.cells[chosen_cells].astype(np.int32)
        compositions.append(Composition(group.number, cells, np.array(rows, np.int32)))
    n_before = ctx.kv.seq_count(seq, -1, -1).n_cells
    compose_cells(ctx.kv._handle, seq, compositions)
    n_left = ctx.kv.seq_count(seq, -1, -1).n_cells
    report = ForgetReport(seq, tuple(places[:-1].tolist()), n_before - n_left, n_left)
    return Composed(report, range(int(places[0]), int(places[-1]) + 1))


def _best(scores: Floats, n: int) -> Places:
    """For each row the indices of its n highest scores; of equal scores the later ones."""
    return np.asarray(np.argsort(scores, axis=1, kind="stable")[:, -n:], np.int64)


def _candidates(
    ctx: Context,
    seq: int,
    n_cells: Callable[[int], int],
    policy: str,
    read: Callable[[int], None],
    repeat: Callable[[], Peaks | None],
    n_keep: int,
    shared: bool,
) -> tuple[TextCells, npt.NDArray[np.bool_], int]:
    """The text, read as its policy wants it; which positions may go, bool (n,); how many cells are to go.

    Arguments and errors: as of chosen().
    """
    text = TextCells(ctx, seq)
    candidates = may_go(text, n_keep, shared)
    n_most = int(text.n_cells[candidates].sum())
    n_wanted = n_cells(n_most)
    if n_most < n_wanted:
        raise CacheFullError(
            f"{n_wanted} cells of sequence {seq} are to be forgotten, and {n_most} may be: "
            f"the first {max(n_keep, N_SINKS)} and the last {N_RECENT} tokens stay, as does what windows "
            "see and what others have, too. Use a larger n_ctx or budget, or smaller batches"
        )
    how = POLICIES[policy]
    if n_wanted and how.n_observed:
        read(how.n_observed)
        text = TextCells(ctx, seq)  # those tokens have other cells now
    if n_wanted and how.repeats:
        text.repeated = repeat()
    return text, candidates, n_wanted


def n_at_once(n_most: int) -> int:
    """How many cells a full text forgets, where n_most may go: 128, or half of them where that is less."""
    return min(N_AT_ONCE, -(-n_most // 2))


def may_go(text: TextCells, n_keep: int, shared: bool) -> npt.NDArray[np.bool_]:
    """Which positions may be forgotten. n_keep, shared: as in chosen()."""
    found: npt.NDArray[np.bool_] = text.is_own | shared
    found[: max(n_keep, N_SINKS)] = False
    found[-N_RECENT:] = False
    if len(text.positions):
        n_seen = max(group.window for group in text.kv.groups)
        found &= text.positions <= text.positions[-1] - n_seen
    return found


def drop(kv: KVCache, seq: int, places: Places) -> ForgetReport:
    """Removes these positions, rising, from a sequence; the others stay where they are."""
    n_before = kv.seq_count(seq, -1, -1).n_cells
    kv._seq_rm_at(seq, places)
    n_left = kv.seq_count(seq, -1, -1).n_cells
    return ForgetReport(seq, tuple(places.tolist()), n_before - n_left, n_left)


def runs_of(places: Places) -> list[range]:
    """Positions, rising, as runs of neighbours."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


def _require_closing(ctx: Context, seq: int, places: Places, n_gone: int) -> None:
    """Raises CacheFullError where gaps can't be closed, once n_gone cells of these positions are empty."""
    kv, positions = ctx.kv, TextCells(ctx, seq).positions
    gaps = np.flatnonzero(positions != np.arange(len(positions)))
    first = min(int(positions[gaps[0]]) if len(gaps) else INT32_MAX, int(places[0]))
    n_copies = kv.seq_count(seq, first, -1).n_shared
    if n_copies > kv.n_free + n_gone:
        raise CacheFullError(
            f"sequence {seq} nears the end of the {ctx.model.n_ctx_train} positions that the model was "
            f"trained on. To close its gaps takes {n_copies} copies of cells that others have, too, and "
            f"{kv.n_free + n_gone} cells would be empty. Remove other sequences (kv.seq_rm, kv.seq_keep), "
            "release holds, or use a larger n_ctx"
        )


def close_gaps(ctx: Context, seq: int) -> None:
    """Moves the cells of a sequence down, so that its positions follow one by one from 0 on.

    Raises CacheFullError as kv.seq_add does, with nothing changed.
    """
    positions = [-1, *TextCells(ctx, seq).positions.tolist()]
    gaps = [(a + 1, b) for a, b in pairwise(positions) if b > a + 1]
    if not gaps:
        return
    require_room(ctx.kv, seq, gaps[0][1])
    for begin, end in reversed(gaps):
        ctx.kv.seq_add(seq, end, -1, begin - end)

"""Forgetting: of a sequence that has too many cells those go that matter least, wherever they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import integer, shown
from pykvgraph.context.cell_scores import POLICIES, Floats, TextCells, checked_composite, checked_policy
from pykvgraph.context.context import Context
from pykvgraph.context.context_shift import require_room
from pykvgraph.context.second_reading import read_again
from pykvgraph.errors import CacheFullError, InvalidArgumentError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.composite import Composition
from pykvgraph.kv_cache.composite import compose as compose_cells
from pykvgraph.types import ForgetReport

POLICY = "keydiff"
N_SINKS = 4  # of a text's first tokens, at which heads look that have nothing to look at (arXiv:2309.17453)
N_RECENT = 64  # of its last tokens
N_AT_ONCE = 128  # cells: to know what they are worth takes reading all K

Places: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Forget:
    """A policy for a text that goes on: it has `budget` cells, and forgets those that matter least.

    budget: the most cells of a sequence; None: as many as the cache has room for. policy: by what cells are
    chosen: one of context.cell_scores.POLICIES (docs/forgetting.md). on_forget: called with a ForgetReport
    each time. composite: each head of each layer keeps
    tokens of its own choice, gathered in composite cells, where the policy tells heads apart ("keydiff").

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
        checked_composite(self.composite, checked_policy(self.policy))
        if self.budget is not None:
            object.__setattr__(self, "budget", integer(self.budget, "budget", N_SINKS + N_RECENT + 1))
        if self.on_forget is not None and not callable(self.on_forget):
            raise InvalidArgumentError(f"on_forget must be a function, got {shown(self.on_forget)}")

    def left(self, kv: KVCache, seq: int) -> int:
        """How many cells the sequence has left of its budget."""
        return (self.budget or kv.n_cells) - kv.seq_count(seq, -1, -1).n_cells

    def room(self, kv: KVCache, seq: int) -> int:
        """How many tokens can come behind the sequence before something must go."""
        return kv.n_free if self.budget is None else min(kv.n_free, self.left(kv, seq))

    def make_room(self, ctx: Context, seq: int, n_tokens: int, last: Sequence[int]) -> None:
        """Forgets until n_tokens more find room.

        last: the ids of the sequence's last tokens, 64 or as many as are known, for policies that decode
        them once more. Raises CacheFullError, with nothing forgotten, when too few cells may be;
        UnsupportedError where there are none to be forgotten, and as require_second_reading() does.
        """
        n_missing = n_tokens - self.room(ctx.kv, seq)
        if n_missing <= 0:
            return
        n_most = n_forgettable(ctx, seq)
        n_cells = max(n_missing, min(N_AT_ONCE, n_most // 2))

        def read(n: int) -> None:
            read_again(ctx, seq, last[-n:])

        if self.composite:
            report = compose(ctx, seq, n_cells, self.policy, read)
        else:
            report = drop(ctx.kv, seq, chosen(ctx, seq, n_cells, self.policy, read))
        if ctx.kv.seq_pos_max(seq) + 1 + report.n_cells > ctx.model.n_ctx_train and ctx.kv.can_shift:
            close_gaps(ctx, seq)
        if self.on_forget is not None:
            self.on_forget(report)


def chosen(
    ctx: Context,
    seq: int,
    n_cells: int,
    policy: str,
    read: Callable[[int], None] = lambda n: None,
    *,
    n_keep: int = N_SINKS,
    shared: bool = False,
) -> Places:
    """The positions of a sequence, rising, that matter least and have n_cells cells or a few more.

    read: decodes the last so many tokens once more, observed. n_keep: so many of the first positions stay, 4
    at least. shared: cells that other sequences or holds have, too, may be forgotten; they aren't empty then.

    Raises what `read` raises; CacheFullError when fewer cells may be forgotten, and UnsupportedError as
    TextCells does.
    """
    text, may_go = _read(ctx, seq, n_cells, policy, read, n_keep, shared)
    numbers = np.flatnonzero(may_go)
    order = numbers[np.argsort(POLICIES[policy].score(text)[numbers], kind="stable")]
    n = int(np.searchsorted(np.cumsum(text.n_cells[order]), n_cells)) + 1
    return np.sort(text.positions[order[:n]])


def compose(
    ctx: Context, seq: int, n_cells: int, policy: str, read: Callable[[int], None] = lambda n: None
) -> ForgetReport:
    """Forgets n_cells cells of a sequence; in those that stay each head has its own choice of tokens.

    The cells that may be forgotten become one span, at the last of their positions (kv_cache.composite). The
    policy must have scores of heads. Where one cell would be left of them it goes, too.

    Raises as chosen() does, and what kv_cache.composite.compose() raises.
    """
    text, may_go = _read(ctx, seq, n_cells, policy, read, N_SINKS, False)
    of_heads, n_kept = POLICIES[policy].of_heads, int(text.n_cells[may_go].sum()) - n_cells
    places = text.positions[may_go]
    if of_heads is None or n_kept < 2:
        return drop(ctx.kv, seq, places)
    chosen_cells = np.flatnonzero(may_go[text.number_of_cells()])
    compositions = []
    for group, layers in zip(text.groups, of_heads(text), strict=True):
        rows = [np.sort(_best(heads[:, chosen_cells], n_kept), axis=1) for heads in layers]
        cells = group.cells[chosen_cells].astype(np.int32)
        compositions.append(Composition(group.number, cells, np.array(rows, np.int32)))
    n_before = ctx.kv.seq_count(seq, -1, -1).n_cells
    compose_cells(ctx.kv._handle, seq, compositions)
    n_left = ctx.kv.seq_count(seq, -1, -1).n_cells
    return ForgetReport(seq, tuple(places[:-1].tolist()), n_before - n_left, n_left)


def _best(scores: Floats, n: int) -> Places:
    """Of each row, where its n highest scores are; of equal ones the later ones."""
    return np.asarray(np.argsort(scores, axis=1, kind="stable")[:, -n:], np.int64)


def _read(
    ctx: Context,
    seq: int,
    n_cells: int,
    policy: str,
    read: Callable[[int], None],
    n_keep: int,
    shared: bool,
) -> tuple[TextCells, npt.NDArray[np.bool_]]:
    """What the policy reads, and which positions may be forgotten; they have n_cells cells or more."""
    text = TextCells(ctx, seq)
    may_go = _may_go(text, n_keep, shared)
    n_most = int(text.n_cells[may_go].sum())
    if n_most < n_cells:
        raise CacheFullError(
            f"{n_cells} cells of sequence {seq} are to be forgotten, and {n_most} may be: "
            f"the first {max(n_keep, N_SINKS)} and the last {N_RECENT} tokens stay, as does what windows "
            "see and what others have, too. Use a larger n_ctx or budget, or smaller batches"
        )
    n_observed = POLICIES[policy].n_observed
    if n_observed:
        read(n_observed)
        text = TextCells(ctx, seq)
    return text, may_go


def n_forgettable(ctx: Context, seq: int, *, n_keep: int = N_SINKS, shared: bool = False) -> int:
    """How many cells of a sequence chosen() may choose. Raises UnsupportedError as TextCells does."""
    text = TextCells(ctx, seq)
    return int(text.n_cells[_may_go(text, n_keep, shared)].sum())


def n_at_once(n_most: int) -> int:
    """How many cells a text that is full forgets, of n_most that it may."""
    return min(N_AT_ONCE, -(-n_most // 2))


def _may_go(text: TextCells, n_keep: int, shared: bool) -> npt.NDArray[np.bool_]:
    """Which positions."""
    may_go: npt.NDArray[np.bool_] = text.is_own | shared
    may_go[: max(n_keep, N_SINKS)] = False
    may_go[-N_RECENT:] = False
    if len(text.positions):
        n_seen = max(group.window for group in text.kv.groups)
        may_go &= text.positions <= text.positions[-1] - n_seen
    return may_go


def drop(kv: KVCache, seq: int, places: Places) -> ForgetReport:
    """Removes these positions, rising, from a sequence; the others stay where they are."""
    n_before = kv.seq_count(seq, -1, -1).n_cells
    for run in runs_of(places):
        kv.seq_rm(seq, run.start, run.stop)
    n_left = kv.seq_count(seq, -1, -1).n_cells
    return ForgetReport(seq, tuple(places.tolist()), n_before - n_left, n_left)


def runs_of(places: Places) -> list[range]:
    """Positions, rising, as runs of neighbours."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs]


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

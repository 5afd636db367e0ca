"""Which waiting text may enter: whether the cells will be there, in every step to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.context.context import Context
from pykvgraph.engine.reading import Reading
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.plan.memory_model import speculation_limit
from pykvgraph.prefix import block
from pykvgraph.sequence.sequence import EVERY

_NEVER = 2**31  # a step that is never reached
_UNBOUNDED = 2**40  # cells

Cells = npt.NDArray[np.int64]


class Growth(NamedTuple):
    """What a text, with the forks that wait for its prompt, does from now on at most.

    first: cells that it takes in the next step. each: in every step behind that one. most: in all. until: the
    number of the step with which it has ended, at the latest; the next step has number 1. widest: how many
    cells of its own it ever has.
    """

    first: int
    each: int
    most: int
    until: int
    widest: int = _UNBOUNDED


class Seen(NamedTuple):
    """The cells of a group, by who sees them.

    by: bool (n_sets, n_texts), which of the texts see the cells of a set. n: (n_sets,), how many these are.
    """

    by: npt.NDArray[np.bool_]
    n: Cells

    @property
    def n_seen(self) -> int:
        """Cells that anybody sees."""
        return int(self.n[self.by.any(axis=1)].sum())


def most_in_use(growths: Sequence[Growth], seen: Seen) -> int:
    """The most cells that are in use in any step to come, if nobody else enters.

    growths: of the texts that `seen.by` has, in its order. Cells that no text sees don't count: what only the
    index keeps is given up when others need it.

    A walk over the steps in which a text may end, from the text with the least left to say to the one with
    the most (as TGIS does, IBM text-generation-inference #98). That these steps are enough: between two of
    them nobody ends, and a text never has fewer cells than in the step before, so the last step of such a
    stretch uses the most.

    That the number is never too small, whatever happens but a text that enters:

    - A text takes at most `first` cells at once and `each` a step, and has ended with step `until`.
    - Cells that several see stay until the last of these has ended; a text's own cells, until it has. The
      index keeps none of them from others, as a text that ends hands over what it has pinned.
    - A text that ends early, is cancelled or fails takes no more cells, and gives back its own.
    - Who shifts takes the cells for its copies: `most` has them, from the first step on.
    """
    first, each, most, until, widest = np.array(growths, np.int64).T
    steps = np.unique(until)
    grown = np.minimum(first[:, None] + each[:, None] * (steps - 1), most[:, None])
    n_seers = seen.by.sum(axis=1)
    own = seen.n[n_seers == 1] @ seen.by[n_seers == 1]
    has = np.minimum(own[:, None] + grown, widest[:, None]) * (until[:, None] >= steps)
    shared = n_seers > 1
    last = (seen.by[shared] * until).max(axis=1, initial=0)
    left = seen.n[shared] @ (last[:, None] >= steps)
    return int((has.sum(axis=0) + left).max())


class Admission:
    """Whether a waiting text may enter.

    overcommit: when its prompt fits; without, when all that it may become fits at every step beside what the
    others may take. least: the tokens of prompts that a step has room for at least, if there are any.
    reading: a text that is read beside those that run, so many tokens between two steps at least. n_pinned:
    tells how many cells stay though no text sees them.

    Groups of cells: those that keep every position have equally many cells, and the same ones in use, so that
    the first of them speaks for all. A group with a window has n_seq_max windows and a batch beside what
    resume points keep, which make way: always enough; or it is as large as the others, and is looked at too,
    as texts with the same cells there may have other ones here. States have two rows for each sequence.
    """

    def __init__(
        self,
        ctx: Context,
        needs_points: bool,
        overcommit: bool,
        least: int,
        n_pinned: Callable[[], int] = lambda: 0,
    ) -> None:
        self._kv = ctx.kv
        self._needs_points = needs_points
        self._overcommit = overcommit
        self._least = least
        self._n_pinned = n_pinned
        self.reading: Reading | None = None
        self._n_batch, self._n_ubatch = ctx.n_batch, ctx.n_ubatch
        groups = [(number, group) for number, group in enumerate(ctx.kv.groups) if group.kind != "state"]
        all_positions = [number for number, group in groups if ctx.swa_full or group.kind == "full"]
        small = [
            number
            for number, group in groups
            if number not in all_positions and group.n_cells < ctx.n_seq_max * group.window + ctx.n_batch
        ]
        self._groups = [_Group(n, groups[n][1].n_cells, 0) for n in all_positions[:1]]
        self._groups += [_Group(n, groups[n][1].n_cells, groups[n][1].window) for n in small]

    def fits(self, running: Sequence[RequestSequence], new: RequestSequence, n_found: int) -> bool:
        """Whether the new text may run beside these.

        n_found: how many of its tokens the cache has. Before the new text runs, the answer supposes that
        others see the cells of these: a text that doesn't fit then doesn't fit at all. When it is one of
        `running`, the answer is exact.
        """
        texts = [*running, *([] if new.runs else [new])]
        todo = [each.n_todo if each.runs else len(each.ids) - n_found for each in texts]
        n_now = todo[texts.index(new)]
        if new.window is not None:  # of a prompt that is longer, it has no more at a time
            n_now = min(n_now, max(new.window.n_ctx - (len(new.ids) - n_now), 0))
        return self._fit(texts, todo, n_now)

    def begin_reading(self, running: Sequence[RequestSequence], reading: Reading) -> bool:
        """Whether a text may be read beside these; then it is counted until `reading` is None again."""
        self.reading = reading
        fits = self._fit(running, [each.n_todo for each in running], 1)
        if not fits:
            self.reading = None
        return fits

    def _fit(self, texts: Sequence[RequestSequence], todo: Sequence[int], n_now: int) -> bool:
        """Beside what is read. todo: as _growths() has it. n_now: tokens of the prompt, for overcommit."""
        if self._is_ample(texts):
            return True
        if self._overcommit:
            return all(self._prompt_fits(group, texts, n_now) for group in self._groups)
        return all(self._all_fit(group, texts, todo) for group in self._groups)

    def _is_ample(self, texts: Sequence[RequestSequence]) -> bool:
        """Whether all that these may become fits even if they share nothing.

        To look at who has which cells takes some milliseconds for a large cache.
        """
        most = self._most_cells(texts)
        return all(most <= self._room(group) for group in self._groups)

    def _most_cells(self, texts: Sequence[RequestSequence]) -> int:
        """What these may become, if they share nothing."""
        most = sum(each.most_cells for each in texts) + sum(len(each.ids) for each in self._read)
        # who shifts copies what others see
        return most + sum(each.most_cells for each in texts if each.window is not None)

    def _room(self, group: _Group) -> int:
        """Cells that texts may have; of layers with a window nothing is pinned."""
        return group.n_cells - (0 if group.window else self._n_pinned())

    def room_for_drafts(self, running: Sequence[RequestSequence], n_tokens: int, share: float) -> int:
        """For how many tokens of drafts there are cells in a step that decodes n_tokens others.

        With them no more than this share of the cells is in use; others may need the rest. Without
        overcommit, and unless everybody's cells are there at once, no more than will always be left over: a
        text that is n tokens ahead has n cells more in each step than it would have, and ends n steps sooner.
        """
        room = _UNBOUNDED
        most = self._most_cells(running)
        if all(most <= self._room(group) for group in self._groups):
            whole = (group for group in self._groups if not group.window)
            least = min(
                (speculation_limit(group.n_cells, share) - most - n_tokens for group in whole), default=0
            )
            if least >= self._n_ubatch:  # more drafts than a step takes, whoever sees which cells
                return least
        todo = [each.n_todo for each in running]
        for group in self._groups:
            seen, growths = self._seen(group, running), self._growths(group, running, todo)
            if not group.window:
                room = min(room, speculation_limit(group.n_cells, share) - seen.n_seen - n_tokens)
            is_short = seen.n_seen + sum(each.most for each in growths) > self._room(group)
            if is_short and not self._overcommit:
                room = min(room, self._room(group) - most_in_use(growths, seen))
        return room

    def _growths(self, group: _Group, texts: Sequence[RequestSequence], todo: Sequence[int]) -> list[Growth]:
        """todo: tokens that are known and not decoded, of each text."""
        n_steps = self._steps_to_read(texts, todo)
        growths = [_growth(each, n, n_steps, group.window) for each, n in zip(texts, todo, strict=True)]
        return growths + [self._growth_read(each, group.window) for each in self._read]

    @property
    def _read(self) -> list[Reading]:
        return [] if self.reading is None else [self.reading]

    def _growth_read(self, reading: Reading, window: int) -> Growth:
        n = reading.n_left
        until = -(-n // reading.n_next(self._least)) if n else 1
        widest = window + min(n, self._n_batch) if window else _UNBOUNDED
        return Growth(n, 0, n, until, widest)

    def _all_fit(self, group: _Group, texts: Sequence[RequestSequence], todo: Sequence[int]) -> bool:
        """In every step to come. todo: as _growths() has it."""
        growths = self._growths(group, texts, todo)
        return not growths or most_in_use(growths, self._seen(group, texts)) <= self._room(group)

    def _prompt_fits(self, group: _Group, texts: Sequence[RequestSequence], n_prompt: int) -> bool:
        """Now, with a cell for each of the others."""
        n_new = sum(min(n, group.window or n) for n in (n_prompt, *(each.n_left for each in self._read)))
        n_others = sum(each.n_rows for each in texts) - 1
        return self._seen(group, texts).n_seen + n_new + n_others <= self._room(group)

    def _seen(self, group: _Group, texts: Sequence[RequestSequence]) -> Seen:
        """The cells of a group, as runs of those that the same texts see; last comes what is read."""
        seq = self._kv.cells(group.number).seq
        packed = np.packbits(seq, axis=1)
        begins = np.flatnonzero((packed[1:] != packed[:-1]).any(axis=1)) + 1
        edges = np.concatenate(([0], begins, [len(seq)]))
        seqs = [*((each.seq, *each.fork_seqs) for each in texts), *((each.seq,) for each in self._read)]
        by = np.zeros((len(edges) - 1, len(seqs)), np.bool_)
        for column, numbers in enumerate(seqs):
            for number in numbers:
                if number >= 0:
                    by[:, column] |= seq[edges[:-1], number]
        return Seen(by, np.diff(edges))

    def _steps_to_read(self, texts: Sequence[RequestSequence], todo: Sequence[int]) -> int:
        """In how many steps all prompts are read, at the latest; _NEVER where nobody can tell.

        In each step a text is the first that reads. It gets all the room that there is, or comes to a place
        where it has to stop, or is done; places that are found later are a block from each other. Nobody can
        tell where more answers may come than a step has room for: then some are passed over.
        """
        room = min(self._least, self._n_batch - sum(each.n_seqs for each in texts) + 1)
        if room < 1:
            return _NEVER
        n_steps = 0
        for each, n in zip(texts, todo, strict=True):
            if n > 1:
                n_steps += n // room + 1
            if n > 1 and self._needs_points:
                n_steps += len(each.places) + n // EVERY + n // block.N_TOKENS + 4
                n_steps += n // each.spacing if each.spacing else n // block.N_TOKENS
        return n_steps


class _Group(NamedTuple):
    """A group whose cells are counted. window: 0 where it keeps every position."""

    number: int
    n_cells: int
    window: int


def _growth(sequence: RequestSequence, n_todo: int, n_steps: int, window: int) -> Growth:
    """n_todo: tokens to decode before its answer, and the first one. n_steps: until all prompts are read."""
    most = sequence.cells_to_take(len(sequence.ids) - n_todo)
    is_moving = sequence.window is not None
    n_read = 1 if n_todo == 1 else n_steps
    # nobody can tell how long a grammar takes
    is_known = n_steps < _NEVER and sequence.unsaid is None
    until = n_read + sequence.n_may_say - 1 if is_known else _NEVER
    widest = sequence.n_seqs * (window + n_todo) if window else _UNBOUNDED
    first = n_todo - 1 + sequence.n_rows
    return Growth(most if is_moving else first, sequence.n_seqs, most, until, widest)

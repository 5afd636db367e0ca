"""Texts that have filled their windows: some of their tokens are given up, and those behind move down."""

from __future__ import annotations

from pykvgraph.context.context import Context
from pykvgraph.context.forgetting import chosen, n_at_once, runs_of
from pykvgraph.engine.context_window import Window
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.errors import KVGraphError


def shift_full(running_set: RunningSet) -> None:
    """Shifts every text that has no room for its next token, in its prompt, too."""
    for sequence in list(running_set.scheduler.running):
        window = sequence.window
        if sequence.runs and window is not None and window.is_full(sequence.n_decoded):
            try:
                gone = _given_up(running_set.context, sequence, window)
            except (KVGraphError, MemoryError) as error:
                running_set.fail(sequence, error)
                running_set.start_over_if_broken()
            else:
                _shift(running_set, sequence, gone)


def _given_up(ctx: Context, sequence: RequestSequence, window: Window) -> list[range]:
    """The tokens that make room, which are at positions of the same numbers."""
    if window.forget is not None and any(group.kind == "full" for group in ctx.kv.groups):
        seq, n_keep = sequence.seq, window.n_keep
        places = chosen(ctx, seq, n_at_once, window.forget, n_keep=n_keep, shared=True)
        if len(places):
            return runs_of(places)
    return [window.discarded(sequence.n_decoded)]


def _shift(running_set: RunningSet, sequence: RequestSequence, gone: list[range]) -> None:
    """Gives up these tokens; the index keeps the text as it was, while nobody needs the cells."""
    running_set.retreat(sequence, gone[0].start)
    if not _room_to_move(running_set, sequence, gone[0].stop):
        return
    for part in reversed(gone):
        sequence.discard(part.start, part.stop)
    try:
        for part in reversed(gone):
            running_set.kv.seq_rm(sequence.seq, part.start, part.stop)
            running_set.kv.seq_add(sequence.seq, part.stop, -1, -len(part))
    except (KVGraphError, MemoryError) as error:
        running_set.fail(sequence, error)
        running_set.start_over_if_broken()


def _room_to_move(running_set: RunningSet, sequence: RequestSequence, begin: int) -> bool:
    """Makes room for copies of the cells from `begin` on that others see; False: it does not run now."""
    while running_set.kv.n_free < running_set.kv.seq_count(sequence.seq, begin, -1).n_shared:
        if running_set.index.evict():
            continue
        youngest = running_set.scheduler.youngest()
        running_set.preempt(youngest)
        if youngest is sequence:
            return False
    return True

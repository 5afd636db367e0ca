"""Texts that have filled their windows: some of their tokens are given up, and those behind move down."""

from __future__ import annotations

from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.errors import KVGraphError


def shift_full(running_set: RunningSet) -> None:
    """Shifts every text that has no room for its next token."""
    for sequence in list(running_set.scheduler.running):
        window = sequence.window
        if sequence.runs and window is not None and sequence.decodes and window.is_full(sequence.n_decoded):
            _shift(running_set, sequence, window.discarded(sequence.n_decoded))


def _shift(running_set: RunningSet, sequence: RequestSequence, gone: range) -> None:
    """Gives up these tokens; the index keeps the text as it was, while nobody needs the cells."""
    running_set.retreat(sequence, gone.start)
    if not _room_to_move(running_set, sequence, gone.stop):
        return
    sequence.discard(gone.start, gone.stop)
    try:
        running_set.kv.seq_rm(sequence.seq, gone.start, gone.stop)
        running_set.kv.seq_add(sequence.seq, gone.stop, -1, -len(gone))
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

"""Texts that have filled their windows: some of their tokens are given up, and those behind move down."""

from __future__ import annotations

from pykvgraph.engine.running import Texts
from pykvgraph.engine.sequence import Branch
from pykvgraph.errors import KVGraphError


def shift_full(texts: Texts) -> None:
    """Shifts every text that has no room for its next token."""
    for branch in list(texts.scheduler.running):
        window = branch.window
        if branch.runs and window is not None and branch.talks and window.is_full(branch.n_decoded):
            _shift(texts, branch, window.discarded(branch.n_decoded))


def _shift(texts: Texts, branch: Branch, gone: range) -> None:
    """Gives up these tokens; the index keeps the text as it was, while nobody needs the cells."""
    texts.retreat(branch, gone.start)
    if not _room_to_move(texts, branch, gone.stop):
        return
    branch.give_up(gone)
    try:
        texts.kv.seq_rm(branch.seq, gone.start, gone.stop)
        texts.kv.seq_add(branch.seq, gone.stop, -1, -len(gone))
    except (KVGraphError, MemoryError) as error:
        texts.fail(branch, error)
        texts.start_over_if_broken()


def _room_to_move(texts: Texts, branch: Branch, begin: int) -> bool:
    """Makes room for copies of the cells from `begin` on that others see; False: it does not run now."""
    while texts.kv.n_free < texts.kv.seq_count(branch.seq, begin, -1).n_shared:
        if texts.index.evict():
            continue
        youngest = texts.scheduler.youngest()
        texts.set_aside(youngest)
        if youngest is branch:
            return False
    return True

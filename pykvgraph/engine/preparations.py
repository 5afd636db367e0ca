"""Texts that will be asked for are decoded while the engine has nothing else to do."""

from __future__ import annotations

from pykvgraph.engine.entry import Entry
from pykvgraph.engine.prepared_text import PreparedText
from pykvgraph.engine.running_set import RunningSet


class Preparations:
    """One of them at a time runs, alone, until somebody else wants something.

    What it has by then stays in the index, as the cells of every text that leaves; it goes on from there.
    """

    def __init__(self, running_set: RunningSet, entry: Entry) -> None:
        self._running_set = running_set
        self._entry = entry
        self._text: PreparedText | None = None

    @property
    def is_running(self) -> bool:
        """Whether one of them has a sequence."""
        return self._text is not None and self._text.runs

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to prepare."""
        return not (self.is_running or self._running_set.to_prepare)

    def begin(self) -> None:
        """The first one that the cache lacks runs; what can't be prepared now is forgotten."""
        to_prepare = self._running_set.to_prepare
        while to_prepare and not self.is_running:
            text = PreparedText(to_prepare.popleft())
            if self._entry.prepare(text):
                self._text = text
                self.has_room(text.n_todo)

    def make_way(self) -> None:
        """Somebody waits: no text is prepared now. The one that ran comes first when nobody waits again."""
        text, self._text = self._text, None
        if text is None or not text.runs:
            return
        self._running_set.leave(text)
        to_prepare = self._running_set.to_prepare
        if len(to_prepare) != to_prepare.maxlen:
            to_prepare.appendleft(text.preparation)

    def has_room(self, n: int) -> bool:
        """Whether there are n empty cells for the one that runs; else it is given up."""
        text = self._text
        assert text is not None
        kv = self._running_set.kv
        if kv.n_free < n:
            self._running_set.give_up_old(text)
        if kv.n_free < n:
            self._running_set.leave(text)
            return False
        return True

"""Texts that are earlier ones with other tokens in their midst: which, and how they get their cells."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.context.common_length import common_length
from pykvgraph.context.context_shift import can_move
from pykvgraph.engine.earlier_texts import EarlierText, EarlierTexts
from pykvgraph.engine.moved_parts import Part, anew_of, move, n_copied, n_exact_of, parts_of, salt_of
from pykvgraph.engine.prepared_text import PreparedText
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.errors import CacheFullError, KVGraphError
from pykvgraph.prefix import block
from pykvgraph.prefix.match import Found, Match
from pykvgraph.prefix.node import Origin
from pykvgraph.sequence.edits import REPAIR


class Edit(NamedTuple):
    """A new text as parts of an earlier one.

    match: what the index has of the earlier one, whose tokens these are, `old`. parts: of it, the first of
    which may begin both. anew: see anew_of(). n_had: tokens at its beginning that are there, and exact.
    """

    match: Match
    old: array[int]
    parts: Sequence[Part]
    anew: list[int]
    n_had: int

    @property
    def n(self) -> int:
        """Tokens up to the end of the last part."""
        return self.parts[-1].new + self.parts[-1].n

    @property
    def n_there(self) -> int:
        """How many of these are not decoded."""
        return self.n - len(self.anew)

    @property
    def n_exact(self) -> int:
        """How many tokens at the beginning are exact once those of `anew` are decoded."""
        return n_exact_of(self.n_had, self.anew)


class Edits:
    """Finds and makes them, where the cache can move cells: in layers that keep every position.

    texts: what requests have read. reuse: every text may have parts of others, of at least so many tokens,
    with nothing between them and nothing repaired, as llama-server's --cache-reuse; 0: only those that ask
    for edits, with REPAIR tokens behind each seam.
    """

    def __init__(self, running_set: RunningSet, texts: EarlierTexts, reuse: int) -> None:
        self._running_set = running_set
        self._texts = texts
        self._reuse = reuse
        self._can_move = can_move(running_set.context)

    def are_for(self, sequence: RequestSequence) -> bool:
        """Whether the text may have approximate cells. One that began without them goes on without."""
        is_asked = sequence.terms.edits or self._reuse > 0
        may_begin = sequence.n_cached < 0 or sequence.use.edited > 0
        return is_asked and may_begin and self._can_move and self._running_set.shares

    def under_salts(self, sequence: RequestSequence) -> list[EarlierText]:
        """A text for each salt under which there is more of this one than under its own, perhaps."""
        if not self.are_for(sequence):
            return []
        return [*{text.salt: text for text in reversed(self._candidates(sequence))}.values()]

    def best(self, sequence: RequestSequence, n_had: int) -> Edit | None:
        """The one that leaves the least to decode; None: it is not worth it, as there are n_had tokens."""
        if not self.are_for(sequence):
            return None
        found: Edit | None = None
        n_most = n_had + self._repair(sequence)
        for text in self._candidates(sequence):
            edit = self._of(text, sequence)
            if edit is not None and edit.n_there > n_most:
                found, n_most = edit, edit.n_there
        return found

    def make(self, sequence: RequestSequence, edit: Edit) -> bool:
        """Its empty sequence gets the parts, and nothing else; False: it can't, and is empty.

        Cells are copied where others have them, so that these keep theirs.
        """
        running_set, kv, seq = self._running_set, self._running_set.kv, sequence.seq
        index, stop = running_set.index, edit.parts[-1].old + edit.parts[-1].n
        try:
            # the sequence sees the cells, and so they stay
            index.unpin(index.attach(Found(edit.match, stop, None), seq))
            self._make_room(sequence, edit.parts)
            move(kv, seq, edit.parts)
        except (KVGraphError, MemoryError):
            kv.seq_rm(seq, -1, -1)
            return False  # if the device has failed, what it decodes next fails, too
        root = edit.match.root
        salt = salt_of(root.salt, sequence.terms.session, edit.old, edit.parts, self._repair(sequence))
        sequence.edit(salt, edit.n, edit.anew)
        of = Origin(root.salt, edit.old[:stop])
        sequence.last = index.begin(salt, edit.n_exact, (of, *root.made_of))
        return True

    def _make_room(self, sequence: RequestSequence, parts: Sequence[Part]) -> None:
        """For copies. What the index gives up of the earlier text itself need not be copied any more."""
        running_set, kv = self._running_set, self._running_set.kv
        while (n_lacking := n_copied(kv, sequence.seq, parts) - kv.n_free) > 0:
            if running_set.give_up_old(sequence):
                continue
            for _ in range(-(-n_lacking // block.N_TOKENS)):
                if isinstance(sequence, PreparedText) or not running_set.index.evict():
                    raise CacheFullError("other texts have the cells")

    def _repair(self, sequence: RequestSequence) -> int:
        """Tokens that are decoded again behind each seam."""
        return REPAIR if sequence.terms.edits else 0

    def _candidates(self, sequence: RequestSequence) -> list[EarlierText]:
        return self._texts.of_session(sequence.known_as())

    def _of(self, text: EarlierText, sequence: RequestSequence) -> Edit | None:
        """The text in place of an earlier one; None: nothing of that would be moved, or is there."""
        match = self._running_set.index.match(text.ids, text.salt)
        repair = self._repair(sequence)
        # the last token is decoded for its output; what reads edited text is never approximate itself
        old, new = text.ids[: match.n], sequence.ids[: -max(repair, 1)][: sequence.n_findable]
        begin = common_length(old, new)
        least, gaps = (2 * repair, True) if repair else (self._reuse, False)
        parts = parts_of(old, new, begin, least, gaps=gaps)
        if not parts:
            return None
        if begin:
            parts.insert(0, Part(0, 0, begin))
        return Edit(match, old, parts, anew_of(parts, repair), min(begin, text.n_exact))

"""A text that is edited in the cache: parts go, or others come in their place, and seams are repaired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import Integers, instance, integer, integer_rows, integers
from pykvgraph.context.batch import Batch
from pykvgraph.context.context_shift import require_room
from pykvgraph.context.document import Document, empty_sequence, require_holdable
from pykvgraph.context.second_reading import require_going_back
from pykvgraph.errors import CacheFullError, InvalidArgumentError, KVGraphError
from pykvgraph.sequence.sequence import TokenSequence
from pykvgraph.sequence.tokens import DecodedTokens

REPAIR = 32  # tokens behind a seam; arXiv:2410.15332 decodes as many of each part again


class Sequence(TokenSequence):
    """The text of one sequence of a context, which can be edited without decoding what comes behind an edit.

    Numbers are of tokens, from 0 on; they are also positions, unless group() has put several on one.

    Behind an edit the cells have read another text than the one that they now are part of: they are
    approximate. `repair` tokens behind each seam are decoded again, in place, and see the text as it is;
    those behind the first seam are exact then. `approximate_from` says where the first token is that isn't;
    go_back() to there, and set() or append() the rest, and all of it is exact again. What is approximate
    is never put into an index of prefixes. docs/editing.md has what an edit costs, with and without repair.

    Edits need K that can be rotated. Repairs need layers without a state, and of layers with a window that
    these have not lost what the tokens see (`Context(swa_full=True)`).
    """

    @property
    def approximate_from(self) -> int | None:
        """The number of the first token that isn't exact; None when all are."""
        n = self._tokens.n_shareable
        return n if n < self._tokens.n_decoded else None

    def remove(self, p0: int, p1: int, repair: int = REPAIR) -> None:
        """Removes the tokens [p0, p1); the first `repair` tokens behind them are decoded again.

        Raises InvalidArgumentError unless 0 <= p0 < p1 <= the number of tokens, CacheFullError when there is
        no room for copies of shared cells and for the tokens that are decoded again, and UnsupportedError
        where the model or its windows allow no edit, or no repair; repair=0 needs none. Nothing is changed
        then. After DeviceError the tokens are removed, and no seam is repaired.
        """
        self._begin_edit()
        p0 = integer(p0, "p0", 0, max(len(self) - 1, 0))
        p1 = integer(p1, "p1", p0 + 1, len(self))
        if p1 == len(self):
            kept = self.ids[:p0]
            if self._go_back(p0) < p0:  # the model can't stop there
                self.set(kept)
            return
        n = min(integer(repair, "repair", 0), len(self) - p1)
        self._require_edit(p0, p1, 0, n)
        self.discard(p0, p1)
        self.repair([(p0, p0 + n)])

    def replace(self, p0: int, p1: int, ids: Integers, repair: int = REPAIR) -> None:
        """Puts `ids` in place of the tokens [p0, p1), and decodes `repair` tokens behind them again.

        p0 == p1: they are inserted. Raises as remove() does. After DeviceError in the first batch the tokens
        that `ids` has no others for are removed; in a later one the text up to p0 is left.
        """
        self._begin_edit()
        p0 = integer(p0, "p0", 0, len(self))
        p1 = integer(p1, "p1", p0, len(self))
        new = integers(ids, "ids", 0, self._ctx.model.n_vocab - 1)
        n = min(integer(repair, "repair", 0), len(self) - p1)
        if len(new) == 0:
            if p0 < p1:
                self.remove(p0, p1, repair)
            return
        if p1 == len(self):
            self.set(np.concatenate([self.ids[:p0], new]))
            return
        self._require_edit(p0, p1, len(new), n)
        if len(new) < p1 - p0:
            self.discard(p0 + len(new), p1)
            p1 = p0 + len(new)
        self._write(p0, p1, new, n)

    def link(self, document: Document, repair: int = REPAIR) -> None:
        """Appends a document, whose first `repair` tokens are decoded again behind the text.

        Its cells are copied, since they move. Behind just the text that it was read behind they are shared,
        and exact, and none is decoded again: in an empty text, or by read(behind=). Needs an empty
        sequence of the context for a moment, which no other thread may use meanwhile. Raises
        InvalidArgumentError where there is none, or for a document that was released or is of another
        context, CacheFullError when its tokens don't fit, and UnsupportedError as remove() does. Nothing is
        changed then.
        """
        instance(document, Document, "document")
        self._begin_edit()
        require_holdable(self._ctx.kv, self._ctx.swa_full)
        begin = len(self)
        is_exact = self.approximate_from is None and np.array_equal(self.ids, document.behind)
        repair = integer(repair, "repair", 0)
        n = 0 if is_exact else min(repair, len(document))
        if self._earlier is not None:
            self._earlier.make_room(len(document) + n)
        if not is_exact:
            self._require_cells(self.positions.of(begin), range(0), len(document), n)
        before = self._tokens.n_true
        self._tokens.n_true = before if is_exact else min(before, begin)
        try:
            self._arriving(document.ids.tolist(), partial(self._attach, document))
        except Exception:
            self._tokens.n_true = before
            raise
        self.repair([(begin, begin + n)])

    def repair(self, spans: Iterable[tuple[int, int]]) -> None:
        """Decodes the tokens of these spans [begin, end) again, in place, in as few batches as they fit in.

        Each sees the text as it is before it. Tokens that follow on exact ones are exact then. Raises
        InvalidArgumentError for a span that isn't within the text, has several tokens on one position, or has
        a part of the tokens of composite cells (forget(composite=True)); these go when all are repaired, and
        CacheFullError comes before. And what Context.decode raises: what earlier batches repaired stays
        repaired.
        """
        self._begin_edit()
        numbers: set[int] = set()
        for begin, end in integer_rows(spans, "spans", ("begin", "end"), len(self)):
            numbers.update(range(begin, integer(end, "end", begin)))
        self._require_own_positions(numbers)
        for span in self._whole_composites(numbers):
            self._give_up_composite(span, len(numbers))
        for part in self._batches(sorted(numbers)):
            self._decode_again(self._tokens, part)

    def _require_own_positions(self, numbers: set[int]) -> None:
        """Raises InvalidArgumentError where one of these tokens shares its position with another."""
        at = Counter(self.positions.head)
        for number in sorted(number for number in numbers if number < len(self.positions.head)):
            if at[self.positions.of(number)] > 1:
                raise InvalidArgumentError(
                    f"token {number} shares position {self.positions.of(number)} with others, and can't be "
                    "decoded again there: repair other tokens, or go_back() to before it"
                )

    def _give_up_composite(self, span: range, n_decoded: int) -> None:
        """Empties the composite cells of these tokens, which are decoded then, of n_decoded in all."""
        kv, last = self._ctx.kv, self.positions.of(span.stop - 1)
        n_more = len(span) + min(n_decoded - len(span), self._ctx.n_batch)
        if self._earlier is not None:
            self._earlier.make_room(n_more)
        n_free = kv.n_free + kv.seq_count(self._seq, last, last + 1).n_cells
        if n_free < n_more:
            raise CacheFullError(
                f"tokens {span.start} to {span.stop - 1} share composite cells: to decode them takes "
                f"{n_more} cells, and {n_free} would be empty. Use a larger n_ctx, or free other texts"
            )
        kv.seq_rm(self._seq, last, last + 1)

    def _begin_edit(self) -> None:
        self._recover()
        if not len(self):
            self._n_adapted = self._ctx.kv._n_adapted
        else:
            self._require_known()

    def _batches(self, numbers: list[int]) -> list[list[int]]:
        n = self._ctx.n_batch
        return [numbers[first : first + n] for first in range(0, len(numbers), n)]

    def _decode_again(self, tokens: DecodedTokens, numbers: list[int]) -> None:
        """One batch. tokens: as the text is to be."""
        batch = Batch()
        for number in numbers:
            batch.add(tokens.ids[number], tokens.positions.of(number), (self._seq,))
        if self._earlier is not None:
            self._earlier.make_room(len(numbers))
        self._ctx.decode(batch, repair=True)
        for number in numbers:
            tokens.repaired(number)

    def _write(self, p0: int, p1: int, new: npt.NDArray[np.int32], n_repair: int) -> None:
        """Puts at least as many tokens in place of [p0, p1), and decodes those behind them again."""
        kv, seq, end = self._ctx.kv, self._seq, self.positions.of(p1)
        further, last = len(new) - (p1 - p0), kv.seq_pos_max(seq)
        before, left = self._tokens.copy(), self._tokens.copy()
        left.replace(p0, p1, new.tolist())
        any_is_there = False
        self._is_torn = True
        self._tokens.cut(p0)
        try:
            if further:
                kv.seq_add(seq, end, -1, further)
            for numbers in self._batches(list(range(p0, p0 + len(new) + n_repair))):
                self._decode_again(left, numbers)
                any_is_there = True
        except KVGraphError:
            if not any_is_there:
                if kv.seq_pos_max(seq) != last:
                    kv.seq_add(seq, end + further, -1, -further)
                self._tokens = before
                self._is_torn = False
            raise
        self._tokens = left
        self._is_torn = False

    def _attach(self, document: Document) -> None:
        kv, next_position, begin = self._ctx.kv, self._tokens.next_position, len(document.behind)
        if next_position == begin == 0:
            document.attach(kv, self._seq)
            return
        seq = empty_sequence(kv) if next_position else self._seq
        document.attach(kv, seq)
        is_whole = False
        try:
            if begin:
                kv.seq_rm(seq, 0, begin)
            if next_position != begin:
                kv.seq_add(seq, begin, -1, next_position - begin)
            if next_position:
                kv.seq_cp(seq, self._seq, -1, -1)
            is_whole = True
        finally:
            if seq != self._seq or not is_whole:
                kv.seq_rm(seq, -1, -1)

    def _require_cells(self, moved_from: int, freed: range, n_more: int, n_decoded: int) -> None:
        """Raises CacheFullError: a batch that replaces cells needs as many empty ones, until it is over."""
        n_at_once = min(n_decoded, self._ctx.n_batch)
        require_room(self._ctx.kv, self._seq, moved_from, freed, n_more + n_at_once)

    def _require_edit(self, p0: int, p1: int, n_new: int, n_repair: int) -> None:
        """Raises what would come in the middle of an edit of [p0, p1) that decodes so many tokens."""
        self._whole_composites(range(p0, p1))
        self._require_apart(p0 if n_new else p1, p1 + n_repair)
        kv, at, end, n_decoded = self._ctx.kv, self.positions.of(p0), self.positions.of(p1), n_new + n_repair
        last = p1 + n_repair  # the first token behind
        firsts = [self.positions.first_at(self.positions.of(n)) for n in (p0, last)]
        if n_decoded and (firsts != [p0, last] or self.positions.of(last) - at != last - p0):
            raise InvalidArgumentError(
                f"some of the tokens {p0} to {last - 1} share a position, and can't be told apart there"
            )
        if self._earlier is not None:
            self._earlier.clear()  # cells that it holds would be copied, not moved
        self._require_cells(end, range(min(at + n_new, end), end), max(at + n_new - end, 0), n_decoded)
        if n_decoded:
            require_going_back(kv, self._seq, at)

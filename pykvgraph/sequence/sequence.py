"""The text of a sequence, which changes from turn to turn: what the cache has of it isn't decoded again."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import INT32_MAX, Integers, integer, integers
from pykvgraph.context.batch import Batch
from pykvgraph.context.cell_scores import Peaks, checked_composite, checked_policy
from pykvgraph.context.common_length import common_length
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.context.context_shift import ContextShift, self_extend
from pykvgraph.context.forgetting import POLICY, chosen, compose, drop
from pykvgraph.context.repetition import repeated
from pykvgraph.context.second_reading import read_again, require_second_reading
from pykvgraph.errors import (
    CacheFullError,
    InvalidArgumentError,
    KVGraphError,
    NotCopied,
    UnsupportedError,
)
from pykvgraph.model.model import Model
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.prefix.match import Found
from pykvgraph.prefix.sequence_index import SequenceIndex, needs_points
from pykvgraph.sequence.composites import composite_spans
from pykvgraph.sequence.tokens import DecodedTokens, Positions
from pykvgraph.types import ForgetReport, ShiftReport

R = TypeVar("R")

N_CHECKPOINTS = 8  # that checkpoint_cells() makes room for; states have room for as many by default
EVERY = 512  # positions from one checkpoint to the next


class Change(NamedTuple):
    """What TokenSequence.set() did.

    n_common: the tokens with which the old text and the new one begin alike. n_kept: how many of these stayed
    in the cache; the other n_common - n_kept were decoded again. n_decoded: all that were decoded. last: the
    output of the last token.
    """

    n_common: int
    n_kept: int
    n_decoded: int
    last: LastOutput


class TokenSequence(NotCopied):
    """The text of one sequence of a context, for conversations: each prompt begins as the one before.

    set(ids) makes the sequence hold exactly these tokens. It finds where they part from the text that the
    sequence has, goes back to there, or to the last position before it from which the model can go on, and
    decodes the rest. Any model can go back in layers that attend to everything. Layers with a window and
    recurrent layers can go back only to checkpoints, and for these layers set() keeps some:

    - where later texts are likely to part from this one: at the positions `at`, such as the beginning of the
      last message, which may be edited; when none are given, where the new text parts from the old one;
    - before the last token, so that another answer to the same prompt takes one token;
    - at each multiple of `every`, for texts that part elsewhere.

    When there is no room for all of them, the cache drops those that lie closest together.

    The sequence belongs to this object. Tokens that something else appends, such as generate(), must be told
    by record(); when something else removes or moves tokens, the object must be made anew. A sequence that
    has become shorter, as by kv.clear(), is decoded from the beginning, and so is one after set_adapters().
    After Ctrl-C in any call the object knows what the sequence has.

    earlier: an index of what other texts of this sequence began with. Where set() takes leave of tokens, the
    index keeps their cells, for as long as nobody needs them: to come back to an earlier text decodes nothing
    again but its last token. The index must be this object's alone.
    """

    def __init__(
        self, ctx: Context, seq: int = 0, *, every: int = EVERY, earlier: SequenceIndex | None = None
    ) -> None:
        self._ctx = ctx
        self._earlier = earlier
        self._n_adapted = ctx.kv._n_adapted  # when the sequence got its tokens
        self._seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
        self._every = integer(every, "every", 1)
        # Never more than the sequence has, whatever a call is interrupted by: shortened before the sequence
        # is, and extended after it.
        self._tokens = DecodedTokens()
        self._coming = array("i")  # what is being decoded; it may be there when Ctrl-C comes right after it
        self._batch = Batch()
        self._is_torn = False  # a call that removes or rearranges tokens was interrupted
        keeps_all = _keep_all(ctx)
        self._goes_back_anywhere = all(keeps_all)
        self._can_be_full = any(keeps_all)

    def __len__(self) -> int:
        return len(self._tokens.ids)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The tokens that the sequence is known to have; a copy."""
        return np.array(self._tokens.ids, np.int32)

    @property
    def positions(self) -> Positions:
        """The position of each token."""
        return self._tokens.positions

    def set(self, ids: Integers, at: Integers = ()) -> Change:
        """Makes the sequence hold exactly `ids`; returns what that took, with the output of the last token.

        At least the last token is decoded, for its output. at: positions from 1 to the number of tokens,
        where a later text may part from this one.

        Raises InvalidArgumentError when there are no ids, or one is not in the vocabulary, and CacheFullError
        when they don't fit, both with nothing changed; else what Context.decode raises: the sequence has the
        first tokens then, as far as they were decoded.
        """
        wanted = integers(ids, "ids", 0, self._ctx.model.n_vocab - 1)
        if len(wanted) == 0:
            raise InvalidArgumentError("ids is empty: it takes a token to say what comes after it")
        self._recover()
        places = integers(at, "at", 1, len(wanted)).tolist()
        n_common = self._common_with(wanted)
        self._require_room(n_common, len(wanted))
        if self._earlier is not None:
            n_common = self._switch(self._earlier, array("i", wanted.tobytes()), n_common)
        n_kept = self._go_back(min(n_common, len(wanted) - 1))
        marks = checkpoint_places(n_kept, len(wanted), places or [n_common], self._every)
        last = self._decode(wanted, n_kept, [] if self._goes_back_anywhere else marks)
        return Change(n_common, n_kept, len(wanted) - n_kept, last)

    def append(self, token: int, *, copy_logits: bool = True) -> LastOutput:
        """Decodes one token at the end of the text; copy_logits: whether the result has its logits."""
        self._recover()
        number = integer(token, "token", 0, INT32_MAX)

        def decode() -> LastOutput:
            return self._ctx._handle.call(self._ctx._append, self._seq, number, copy_logits)

        try:
            return self._arriving((number,), decode)
        except CacheFullError:
            if self._earlier is None or not self._earlier.make_room(1):
                raise
        return self._arriving((number,), decode)

    def discard(self, begin: int, end: int) -> ShiftReport:
        """Removes the tokens [begin, end) from the text; those behind them move down, and stay as they are.

        That is a context shift (ContextShift.apply): nothing is decoded. Recurrent layers go on remembering
        what they read. Raises InvalidArgumentError unless 0 <= begin < end < the number of tokens, and when
        begin or end is not the first token on its position; what apply() raises, too:
        after UnsupportedError and CacheFullError the text is as it was.
        """
        self._recover()
        begin = integer(begin, "begin", 0, len(self) - 1)
        end = integer(end, "end", begin + 1, len(self) - 1)
        positions = self.positions
        p0, p1 = positions.of(begin), positions.of(end)
        if (positions.first_at(p0), positions.first_at(p1)) != (begin, end):
            raise InvalidArgumentError(f"tokens before {begin} or {end} share the position of these")
        self._whole_composites(range(begin, end))
        left = self._tokens.copy()
        left.discard(begin, end)
        return self._rearranged(begin, left, lambda: self._shift(p0, p1))

    def _shift(self, p0: int, p1: int) -> ShiftReport:
        """Removes the positions [p0, p1); those behind them move down."""
        kv, seq = self._ctx.kv, self._seq
        if kv.seq_count(seq, p0, p1).n_cells or kv._lost(0, seq) >= p0:
            return ContextShift(p0, p1 - p0).apply(kv, seq)
        kv.seq_add(seq, p1, -1, p0 - p1)  # all of them are forgotten
        return ShiftReport(seq, p0, p1 - p0, kv.seq_pos_max(seq) + 1, kv.update())

    def group(self, begin: int, end: int, n_grp: int) -> None:
        """Puts every n_grp neighbouring tokens of [begin, end) on one position (self_extend).

        Raises InvalidArgumentError unless 0 <= begin < end <= the number of tokens and n_grp >= 1, and when
        some of these tokens, or of those behind them, share a position already; CacheFullError as self_extend
        does. Nothing is changed then.
        """
        self._recover()
        begin = integer(begin, "begin", len(self.positions.head), len(self) - 1)
        end = integer(end, "end", begin + 1, len(self))
        n_grp = integer(n_grp, "n_grp", 1)
        p0, p1 = self.positions.of(begin), self.positions.of(end)
        self._require_apart(begin, end)
        left = self._tokens.copy()
        left.group(begin, end, n_grp)
        self._rearranged(begin, left, lambda: self_extend(self._ctx.kv, self._seq, p0, p1, n_grp))

    def _rearranged(self, begin: int, left: DecodedTokens, work: Callable[[], R]) -> R:
        """What work() returns, which leaves these tokens; they were the same up to `begin`."""
        if self._earlier is not None:
            self._earlier.clear()  # cells that it holds would be copied, not moved
        before = self._tokens.copy()
        self._is_torn = True
        self._tokens.cut(begin)
        try:
            result = work()
        except (UnsupportedError, CacheFullError):
            self._tokens = before
            self._is_torn = False
            raise
        self._tokens = left
        self._is_torn = False
        return result

    def forget(self, n_cells: int, policy: str = POLICY, composite: bool = False) -> ForgetReport:
        """Gives up the cells of those tokens that matter least, n_cells or a few more; returns which.

        policy: by what they are chosen, one of context.cell_scores.POLICIES (docs/forgetting.md). The first 4
        tokens and the last 64 stay, and so do those that a window sees, and cells that other sequences or
        holds have, too.

        The text stays what it is: `ids` has the forgotten tokens, all positions are as they were, and set()
        to a longer text decodes what is new alone. What comes behind the first forgotten token doesn't see it
        any more, so none of it is put into an index of prefixes. Sequence.repair() of forgotten tokens
        decodes them again.

        composite: each head of each layer keeps tokens of its own choice, gathered in composite cells; for
        policies that tell heads apart, all but "window". All that may be forgotten is one span then, which
        stays or goes as a whole: go_back() into it goes to where it begins, and an edit or a repair takes all
        of it.

        Policies that look at attention decode the last token ("tova") or the last 64 ("snapkv") once more,
        in their places; "kvzip" decodes the whole text once more, behind itself, in parts (of 256 tokens at
        most) whose cells are empty again afterwards.

        Raises InvalidArgumentError for a bad argument, and when something else has removed the text's end or
        changed the adapters; CacheFullError when fewer cells may be forgotten, and UnsupportedError where
        each layer has a window or a state, or a policy can't decode those tokens once more
        (context.second_reading). Nothing is changed then.
        """
        n_wanted = integer(n_cells, "n_cells", 1)
        checked_composite(composite, checked_policy(policy))
        self._recover()
        self._require_known()
        report = (self._compose if composite else self.forget_some)(lambda _: n_wanted, policy)
        assert report is not None
        return report

    def _compose(self, n_cells: Callable[[int], int], policy: str) -> ForgetReport:
        """forget() with composite cells."""
        if self._earlier is not None:
            self._earlier.clear()  # cells that it holds would stay
        before = self._tokens.n_true
        self._tokens.forgotten(0)  # should that be interrupted, nobody may share what is there
        try:
            report, places = compose(self._ctx, self._seq, n_cells, policy, self._read_again, self._repeat)
        except KVGraphError:
            self._tokens.n_true = before
            raise
        if places:
            self._tokens.composed(*(self.positions.first_at(p) for p in (places.start, places.stop)))
        # not where composite cells alone were composed, which are not exact already; in one step for Ctrl-C
        first = self.positions.first_at(report.positions[0]) if report.positions else before
        self._tokens.n_true = min(before, first)
        return report

    def forget_some(self, n_cells: Callable[[int], int], policy: str) -> ForgetReport | None:
        """As forget(): n_cells(n) cells, of n that may be; None where that is 0, and nothing is done."""
        self._recover()
        if self._earlier is not None:
            self._earlier.clear()  # cells that it holds would stay
        places = chosen(self._ctx, self._seq, n_cells, policy, self._read_again, self._repeat)
        if not len(places):
            return None
        self._tokens.forgotten(self.positions.first_at(int(places[0])))
        return drop(self._ctx.kv, self._seq, places)

    def _composites(self) -> list[range]:
        """The tokens of each span of composite cells."""
        return composite_spans(self._ctx, self._seq, self._tokens)

    def _whole_composites(self, numbers: Collection[int]) -> list[range]:
        """Spans of composite cells that have any of these tokens.

        Raises InvalidArgumentError where the tokens are a part of one.
        """
        found = [span for span in self._composites() if not set(span).isdisjoint(numbers)]
        for span in found:
            if not set(span).issubset(numbers):
                raise InvalidArgumentError(
                    f"tokens {span.start} to {span.stop - 1} share composite cells, which stay or go as a "
                    "whole: take all of them, or none"
                )
        return found

    def _require_apart(self, begin: int, end: int) -> None:
        """Raises InvalidArgumentError where any of the tokens [begin, end) has composite cells."""
        for span in self._composites():
            if begin < span.stop and end > span.start:
                raise InvalidArgumentError(
                    f"tokens {span.start} to {span.stop - 1} share composite cells: they can only "
                    "stay, be removed (with repair=0), or be repaired as a whole"
                )

    def find_forgotten(self) -> None:
        """To be called when cells of the text may have been forgotten before it was recorded."""
        kv = self._ctx.kv
        full = [index for index, group in enumerate(kv.groups) if group.kind == "full"]
        if full:
            view = kv.cells(full[0])
            has = set(view.pos[view.seq[:, self._seq]].tolist())
            gone = (n for n in range(len(self)) if self.positions.of(n) not in has)
            self._tokens.forgotten(next(gone, INT32_MAX))

    def _read_again(self, n: int) -> None:
        """Decodes the last n tokens once more, observed."""
        ids = self._tokens.ids[-n:]
        require_second_reading(self._ctx, self._seq, len(ids))
        n_true = self._tokens.n_true
        self._tokens.cut(len(self) - len(ids))  # should that be interrupted, they are not there
        read_again(self._ctx, self._seq, ids)
        self._tokens.extend(ids)
        self._tokens.n_true = n_true

    def _repeat(self) -> Peaks:
        """What the text attends to when it is read once more, behind itself."""
        self._is_torn = True  # should that be interrupted, there may be tokens behind the text
        try:
            return repeated(self._ctx, self._seq, self._tokens.ids)
        finally:
            self._is_torn = self._ctx.kv.seq_pos_max(self._seq) >= self._tokens.next_position

    def record(self, ids: Integers, positions: Positions | None = None) -> None:
        """Tells that these tokens were appended to the sequence by something else.

        positions: of all tokens; None: they follow one by one.
        """
        del self._coming[:]
        self._tokens.positions = positions or self.positions
        self._tokens.extend(integers(ids, "ids", 0, self._ctx.model.n_vocab - 1).tolist())

    def _arriving(self, ids: Sequence[int], decode: Callable[[], R]) -> R:
        """What decode() returns, which appends these tokens; Ctrl-C may come at any moment."""
        self._coming = array("i", ids)
        try:
            result = decode()
        except Exception:  # which KeyboardInterrupt is not
            del self._coming[:]
            raise
        self._tokens.extend(self._coming)
        del self._coming[:]
        return result

    def _recover(self) -> None:
        """Finds out whether what was being decoded when a call was interrupted is there."""
        if self._is_torn:  # positions behind the tokens that are known are anybody's guess
            self._go_back(len(self))
        n_coming = len(self._coming)
        self._tokens.n_decoded = len(self)  # Ctrl-C may have come between a change of one and of the other
        if n_coming and self._ctx.kv.seq_pos_max(self._seq) + 1 == self._tokens.next_position + n_coming:
            self._tokens.extend(self._coming)
        del self._coming[:]

    def _common_with(self, wanted: npt.NDArray[np.int32]) -> int:
        if self._is_stale():
            self._is_torn = True  # until set() has gone back to the beginning
            self._tokens.cut(0)
        self._n_adapted = self._ctx.kv._n_adapted
        return common_length(self._tokens.ids, wanted)

    def _is_stale(self) -> bool:
        """Whether the cache has lost the end of the text, or other adapters take part since then."""
        kv, end = self._ctx.kv, self._tokens.next_position
        return kv.seq_pos_max(self._seq) + 1 < end or kv._n_adapted != self._n_adapted

    def _require_known(self) -> None:
        """Raises InvalidArgumentError where _is_stale()."""
        if self._is_stale():
            raise InvalidArgumentError(
                f"sequence {self._seq} of the cache has lost cells of this text, or other adapters take part "
                "than when it was decoded: set() it again"
            )

    def _switch(self, earlier: SequenceIndex, wanted: array[int], n_common: int) -> int:
        """Puts the text away where much of it goes, and takes one that begins more like the wanted one.

        Returns with how many tokens the text then begins as the wanted one does.
        """
        salt = block.under(b"", self._ctx.kv._under.key)
        found = earlier.find(wanted, len(wanted) - 1, salt)
        tokens = self._tokens
        n_here = tokens.n_shareable
        if found.n > n_common or n_here - n_common >= block.N_TOKENS:
            if n_here == tokens.n_decoded:
                earlier.keep(tokens.ids, n_here, self._seq, salt)
            if found.n > n_common:
                n_common = self._take(earlier, wanted, found)
        return n_common

    def _take(self, earlier: SequenceIndex, wanted: array[int], found: Found) -> int:
        """The sequence gets what was found of the wanted text, in place of what it has."""
        self._is_torn = True  # should that be interrupted, cells of either text may be there
        self._tokens.cut(0)
        self._ctx.kv.seq_rm(self._seq, -1, -1)
        if earlier.show(found, self._seq):
            self._tokens.extend(wanted[: found.n])
        self._is_torn = False
        return len(self)

    def _require_room(self, n_common: int, n: int) -> None:
        if not self._can_be_full:
            return
        kv = self._ctx.kv
        if self._earlier is not None:  # which gives up its cells
            others = int(kv.seq_bounds().n_cells.sum()) - kv.seq_count(self._seq, -1, -1).n_cells
            if n + others <= kv.n_cells:
                return
        position = self.positions.of(n_common)
        n_kept = self.positions.first_at(position)  # a token goes with those that share its position
        after = kv.seq_count(self._seq, position, -1)
        room = kv.n_free + after.n_cells - after.n_shared
        if n - n_kept > room:
            raise CacheFullError(
                f"{n} tokens don't fit: {n_kept} of them are in the cache, which has room for {room} more. "
                "Use a larger n_ctx or a shorter text, or remove tokens of other sequences"
            )

    def go_back(self, n: int) -> int:
        """Removes the tokens from number n on, more if the model can't stop there; returns how many stay."""
        self._recover()
        return self._go_back(min(integer(n, "n", 0), len(self)))

    def _go_back(self, n: int) -> int:
        position = self.positions.of(n)
        self._is_torn = True
        self._tokens.cut(self.positions.first_at(position))
        there = self._ctx.kv.rewind(self._seq, position)
        there = min(there, self._ctx.kv.seq_pos_max(self._seq) + 1)  # what came before may be forgotten
        self._tokens.cut(self.positions.first_at(there))
        self._is_torn = False
        return len(self)

    def _decode(self, ids: npt.NDArray[np.int32], begin: int, marks: list[int]) -> LastOutput:
        """Decodes the text from a position on, with checkpoints at the marks."""
        if begin in marks:
            self._ctx.kv.checkpoint(self._seq)
        while True:
            end = min(begin + self._ctx.n_batch, len(ids))
            inside = [p for p in marks if begin < p <= end]
            try:
                last = self._decode_part(ids, begin, end, inside)
            except CacheFullError:
                if not inside:
                    raise
                last = self._decode_part(ids, begin, end, [])  # checkpoints are worth having, not more
            begin = end
            if last is not None:
                return last

    def _decode_part(
        self, ids: npt.NDArray[np.int32], begin: int, end: int, checkpoints: list[int]
    ) -> LastOutput | None:
        """One batch; the output of the text's last token when it has it."""
        self._batch.clear()
        is_last = end == len(ids)
        pos0 = self._tokens.next_position
        marks = [pos0 + n - begin for n in checkpoints]
        self._batch.extend(ids[begin:end], pos0, (self._seq,), "last" if is_last else False, marks)
        if self._earlier is not None:
            self._earlier.make_room(end - begin)
        coming = ids[begin:end].tolist()
        if is_last:
            return self._arriving(coming, lambda: self._ctx._handle.call(self._ctx._decode_last, self._batch))
        return self._arriving(coming, lambda: self._ctx.decode(self._batch))


def earlier_texts(ctx: Context) -> SequenceIndex:
    """For TokenSequence(earlier=). Resume points, where a model needs them, have half of the checkpoints."""
    return SequenceIndex(PrefixIndex(ctx.kv, N_CHECKPOINTS // 2 if needs_points(ctx) else 0))


def _keep_all(ctx: Context) -> list[bool]:
    """For each group of cells whether it keeps every position."""
    return [g.kind == "full" or (g.kind == "window" and g.n_cells == ctx.n_ctx) for g in ctx.kv.groups]


def checkpoint_places(n_kept: int, n: int, at: list[int], every: int) -> list[int]:
    """Where a text of n tokens gets checkpoints, of which the first n_kept are in the cache already."""
    places = {n - 1, *at, *range(0, n, every)}
    return sorted(p for p in places if max(n_kept, 1) <= p)


def checkpoint_cells(model: Model, n: int = N_CHECKPOINTS) -> int:
    """`Context(checkpoint_cells=)` with room for n checkpoints in each group of layers with a window."""
    return n * max((layer.window for layer in model.layers), default=0)

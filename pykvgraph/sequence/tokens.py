"""The tokens of one sequence: their ids, how many of them the cache has, and at which positions."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from pykvgraph.checks import INT32_MAX


class Positions:
    """Positions of tokens 0, 1, 2, ... of a text that begins at position 0 and has no gaps.

    head: the positions of the first tokens, up to the last one that shares its position with another; the
    tokens behind them follow one by one.
    """

    def __init__(self, head: list[int] | None = None) -> None:
        self.head = head or []
        while self.head and self.head[-1] == (self.head[-2] + 1 if len(self.head) > 1 else 0):
            self.head.pop()

    def of(self, n: int) -> int:
        """The position of token n, or for the number of tokens the next position."""
        if n < len(self.head):
            return self.head[n]
        return n - len(self.head) + (self.head[-1] + 1 if self.head else 0)

    def first_at(self, position: int) -> int:
        """The first token at a position or behind it."""
        if self.head and position <= self.head[-1]:
            return bisect_left(self.head, position)
        return position - self.of(len(self.head)) + len(self.head)

    def removed(self, begin: int, end: int) -> Positions:
        """Those of the text without the tokens [begin, end); both must be the first on their positions."""
        distance = self.of(end) - self.of(begin)
        return Positions([*self.head[:begin], *(position - distance for position in self.head[end:])])

    def replaced(self, begin: int, end: int, n: int) -> Positions:
        """Those of the text with n tokens in place of [begin, end), both the first on their positions."""
        first = self.of(begin)
        further = first + n - self.of(end)
        before = [self.of(number) for number in range(begin)]
        behind = [position + further for position in self.head[end:]]
        return Positions([*before, *range(first, first + n), *behind])

    def grouped(self, begin: int, end: int, n_grp: int) -> Positions:
        """Those after self_extend on the tokens [begin, end), none of which shares its position yet."""
        p0 = self.of(begin)
        before = [self.of(n) for n in range(begin)]
        return Positions([*before, *(p0 + n // n_grp for n in range(end - begin))])


class Tokens:
    """Token ids, of which a sequence of a cache has the first n_decoded.

    It only keeps account, and changes no cells. n_true: of the first so many, any text that begins alike may
    share the cells; those behind them were decoded behind tokens that are gone.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids = array("i", ids)
        self.n_decoded = 0
        self.n_true = INT32_MAX

    @property
    def n_todo(self) -> int:
        """Tokens that are known and not decoded."""
        return len(self.ids) - self.n_decoded

    @property
    def has_shifted(self) -> bool:
        """Whether tokens are gone that others of the tokens were decoded behind."""
        return self.n_true < INT32_MAX

    @property
    def n_shareable(self) -> int:
        """How many of the decoded tokens have cells that others may share."""
        return min(self.n_decoded, self.n_true)

    def begin(self, n_decoded: int) -> None:
        """The sequence is another one, which has so many of the tokens."""
        self.n_decoded = n_decoded
        self.n_true = INT32_MAX

    def discard(self, begin: int, end: int) -> None:
        """The decoded tokens [begin, end) go, and those behind them move down."""
        del self.ids[begin:end]
        self.n_decoded -= end - begin
        self.n_true = min(self.n_true, begin)


class DecodedTokens(Tokens):
    """Tokens that are all decoded, and of which several may share a position. positions: of the tokens.

    composites: the tokens of each span that was composed (composed()), some of which may be gone since then.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        super().__init__(ids)
        self.n_decoded = len(self.ids)
        self.positions = Positions()
        self.composites: list[range] = []  # replaced, never changed

    @property
    def next_position(self) -> int:
        """The position that comes behind the tokens."""
        return self.positions.of(self.n_decoded)

    def extend(self, ids: Iterable[int]) -> None:
        """These tokens come behind the others."""
        self.ids.extend(ids)
        self.n_decoded = len(self.ids)

    def cut(self, n: int) -> None:
        """The first n tokens stay."""
        # in this order: after Ctrl-C between two lines, next_position is too far rather than too near
        self.positions = Positions(self.positions.head[:n])
        del self.ids[n:]
        self.n_decoded = len(self.ids)
        self.composites = [span for span in self.composites if span.stop <= n]
        if n <= self.n_true:
            self.n_true = INT32_MAX

    def discard(self, begin: int, end: int) -> None:
        """As Tokens.discard(); both must be the first on their positions."""
        self.positions = self.positions.removed(begin, end)
        self._move_composites(begin, end, 0)
        super().discard(begin, end)

    def group(self, begin: int, end: int, n_grp: int) -> None:
        """Every n_grp neighbours of [begin, end) share a position; none of these tokens did before."""
        self.positions = self.positions.grouped(begin, end, n_grp)
        self.n_true = min(self.n_true, begin)

    def replace(self, begin: int, end: int, ids: Iterable[int]) -> None:
        """These come in place of the tokens [begin, end), each on its own position, and are not exact."""
        new = array("i", ids)
        self.positions = self.positions.replaced(begin, end, len(new))
        self._move_composites(begin, end, len(new))
        self.ids[begin:end] = new
        self.n_decoded = len(self.ids)
        self.n_true = min(self.n_true, begin)

    def forgotten(self, number: int) -> None:
        """Cells are going from this token on: the others of the text stay."""
        self.n_true = min(self.n_true, number)

    def composed(self, begin: int, end: int) -> None:
        """The tokens [begin, end) share composite cells now, with those that some of them shared any with."""
        apart = [span for span in self.composites if span.stop <= begin or span.start >= end]
        begin = min([begin, *(span.start for span in self.composites if span not in apart)])
        self.composites = [*apart, range(begin, end)]

    def _move_composites(self, begin: int, end: int, n: int) -> None:
        """n tokens come in place of [begin, end), which no span has a part of."""
        further = n - (end - begin)
        self.composites = [
            span if span.stop <= begin else range(span.start + further, span.stop + further)
            for span in self.composites
            if span.stop <= begin or span.start >= end
        ]

    def repaired(self, number: int) -> None:
        """The token was decoded again, behind those that come before it now."""
        if number == self.n_true:
            self.n_true = number + 1 if number + 1 < self.n_decoded else INT32_MAX

    def copy(self) -> DecodedTokens:
        """Tokens that don't change with these."""
        new = DecodedTokens(self.ids)
        new.positions, new.n_true, new.composites = self.positions, self.n_true, self.composites
        return new

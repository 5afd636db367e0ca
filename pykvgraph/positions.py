"""The position of each token of a text in its sequence: where self-extend was at work, several have one."""

from __future__ import annotations

from bisect import bisect_left


class Positions:
    """Positions of tokens 0, 1, 2, ... of a text that begins at position 0 and has no gaps.

    head: the positions of the first tokens, up to the last one that may share its position; the tokens behind
    them follow one by one.
    """

    def __init__(self, head: list[int] | None = None) -> None:
        self.head = head or []

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

    def grouped(self, begin: int, end: int, n_grp: int) -> Positions:
        """Those after self_extend on the tokens [begin, end), none of which shares its position yet."""
        p0 = self.of(begin)
        before = [self.of(n) for n in range(begin)]
        return Positions([*before, *(p0 + n // n_grp for n in range(end - begin))])

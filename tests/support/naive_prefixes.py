"""An index of prefixes as anybody would write it: a dictionary of token tuples, searched from end to end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

BLOCK = 32

Key = tuple[bytes, tuple[int, ...]]  # the salt, and a text from its first token on


@dataclass
class NaiveNode:
    """The last up to 32 tokens of a known text. cells: their numbers. used: when it was part of a text."""

    cells: list[int]
    used: int


@dataclass
class NaiveText:
    """A running text. cells: one for each decoded token. n_known: its whole blocks that the index has."""

    salt: bytes
    ids: list[int]
    cells: list[int] = field(default_factory=list)
    n_known: int = 0

    def key(self, n: int) -> Key:
        return self.salt, tuple(self.ids[:n])


class NaivePrefixes:
    """Says what must be found, which cells are in use, and who goes next."""

    def __init__(self) -> None:
        self.nodes: dict[Key, NaiveNode] = {}
        self.running: list[NaiveText] = []
        self._cells = itertools.count()
        self._clock = itertools.count()

    @property
    def n_used(self) -> int:
        """Cells of running texts and of nodes, each counted once."""
        known = [node.cells for node in self.nodes.values()]
        return len({cell for cells in [*known, *(text.cells for text in self.running)] for cell in cells})

    def n_found(self, ids: list[int], salt: bytes) -> int:
        """With how many tokens some known text under the salt begins as this one."""
        return max((_common(ids, known) for other, known in self.nodes if other == salt), default=0)

    def start(self, ids: list[int], salt: bytes, n: int) -> NaiveText:
        """A text whose first n tokens are shown to it, by way of the node that has most of them."""
        text = NaiveText(salt, ids)
        while len(text.cells) < n:
            at = len(text.cells) // BLOCK * BLOCK
            near = [key for key in self.nodes if self._parent(key) == text.key(at) and key[0] == salt]
            best = max(near, key=lambda key: _common(ids, key[1]))
            text.cells += self.nodes[best].cells[: n - at]
            if n < at + BLOCK or len(best[1]) < at + BLOCK or _common(ids, best[1]) < at + BLOCK:
                self.nodes[best].used = next(self._clock)
            else:
                text.n_known = at + BLOCK
        self._use(text)
        self.running.append(text)
        return text

    def decode(self, text: NaiveText, n: int) -> None:
        """Its next n tokens get cells of their own."""
        text.cells += [next(self._cells) for _ in range(n)]

    def extend(self, text: NaiveText, to_end: bool) -> None:
        """The index learns its whole blocks, or all of it."""
        n = len(text.cells)
        while text.n_known + BLOCK <= n:
            key = text.key(text.n_known + BLOCK)
            cells = text.cells[text.n_known : text.n_known + BLOCK]
            if key not in self.nodes:
                self._add(key, cells)
            elif not self._is_needed(key):
                self.nodes[key].cells = cells
            text.n_known += BLOCK
            self.nodes[key].used = max(self.nodes[key].used, next(self._clock))
        key = text.key(n)
        if to_end and text.n_known < n and self.n_found(text.ids[:n], text.salt) < n:
            self._add(key, text.cells[text.n_known :])

    def end(self, text: NaiveText) -> None:
        self.running.remove(text)
        self._use(text)

    def next_to_go(self) -> Key | None:
        """Of the texts that nothing known or running goes on from, the one used longest ago."""
        parents = {self._parent(key) for key in self.nodes}
        leaves = [key for key in self.nodes if key not in parents and not self._is_needed(key)]
        return min(leaves, key=lambda key: self.nodes[key].used, default=None)

    def _add(self, key: Key, cells: list[int]) -> None:
        """Ends of texts that this one begins with go: it has the same tokens."""
        for other in list(self.nodes):
            is_end = len(other[1]) % BLOCK and self._parent(other) == self._parent(key)
            if is_end and other[0] == key[0] and _common(list(key[1]), other[1]) == len(other[1]):
                del self.nodes[other]
        self.nodes[key] = NaiveNode(cells, next(self._clock))

    def _use(self, text: NaiveText) -> None:
        stamp = next(self._clock)
        for end in range(BLOCK, text.n_known + 1, BLOCK):
            self.nodes[text.key(end)].used = stamp

    def _is_needed(self, key: Key) -> bool:
        n = len(key[1])
        return n % BLOCK == 0 and any(text.n_known >= n and text.key(n) == key for text in self.running)

    @staticmethod
    def _parent(key: Key) -> Key:
        return key[0], key[1][: (len(key[1]) - 1) // BLOCK * BLOCK]


def _common(left: list[int], right: tuple[int, ...]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n

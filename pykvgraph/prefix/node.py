"""A node of the index of prefixes: up to 32 tokens behind those of its parent, and what is kept of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from pykvgraph.context.common_length import common_length
from pykvgraph.kv_cache.hold import Hold, ResumePoint
from pykvgraph.prefix import block

ALL = 1 << 31  # tokens; no text has as many


class Node:
    """Tokens behind other tokens, and the hold on their cells.

    A node of 32 tokens is a block; one of fewer is the end of a text, and has no children. `points` are
    places behind this node to go on from, by the tokens from its end to there, 32 at most.
    """

    __slots__ = (
        "_key",
        "_order",
        "children",
        "end",
        "hold",
        "is_doubled",
        "n_found",
        "n_pins",
        "parent",
        "points",
        "tokens",
        "until",
        "used",
    )

    def __init__(self, parent: Node | None, tokens: bytes, hold: Hold | None) -> None:
        self.parent = parent
        self.tokens = tokens  # four bytes each, little-endian
        self.hold = hold
        self.end: int = (parent.end if parent else 0) + len(tokens) // block.TOKEN_BYTES
        self.children: dict[bytes, Node] = {}
        self._order: list[bytes] = []  # tokens of the children, sorted
        self.points: dict[bytes, Point] = {}
        self.n_pins = 0  # running texts that begin with it
        self.n_found = 0  # texts that have found it; counted where prefixes are compressed
        self.used = 0  # when it was part of a text last
        self.until = 0.0  # nobody evicts it before that time (TimedPins); 0: there is none
        self.is_doubled = False  # running texts have its tokens in different cells
        self._key: bytes | None = None

    @property
    def n_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.tokens) // block.TOKEN_BYTES

    def add(self, child: Node) -> None:
        """A child whose tokens no other has."""
        self.children[child.tokens] = child
        insort(self._order, child.tokens)

    def remove(self, child: Node) -> None:
        """Takes a child away."""
        del self.children[child.tokens]
        del self._order[bisect_left(self._order, child.tokens)]

    def nearest(self, tokens: bytes) -> tuple[Node | None, int]:
        """The child that begins with the most of these tokens, and with how many; with none: None.

        In sorted order it is a neighbour of theirs.
        """
        at = bisect_left(self._order, tokens)
        best: Node | None = None
        most = 0
        for name in self._order[max(at - 1, 0) : at + 1]:
            if (n := common_length(name, tokens)) > most:
                best, most = self.children[name], n
        return best, most

    def path(self) -> list[Node]:
        """From the root to this node."""
        found: list[Node] = []
        at: Node | None = self
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    @property
    def root(self) -> Root:
        """The node where its texts begin."""
        at: Node = self
        while at.parent is not None:
            at = at.parent
        assert isinstance(at, Root)
        return at

    def begins_with(self, other: Node) -> bool:
        """Whether the other one is this one, or before it."""
        at: Node | None = self
        while at is not None and at.end > other.end:
            at = at.parent
        return at is other

    def key(self, root: bytes) -> bytes:
        """Its key in an index whose root has this one (block.root_key), which is always the same."""
        path = []
        node: Node = self
        while node.parent is not None and node._key is None:
            path.append(node)
            node = node.parent
        found = root if node._key is None else node._key
        for each in reversed(path):
            found = each._key = block.key(found, each.tokens)
        return found


class Origin(NamedTuple):
    """The tokens of a text under a salt, as far as an edit has taken cells of it."""

    salt: bytes
    ids: array[int]

    def begins(self, ids: array[int], salt: bytes) -> bool:
        """Whether a text under a salt begins with these tokens."""
        return self.salt == salt and ids[: len(self.ids)] == self.ids


class Root(Node):
    """Where texts under a salt begin; it has no tokens, and no hold.

    n_exact: the first tokens of each of them whose cells have read just the tokens before them; ALL: the
    others', too. made_of: whose cells became those of an edited text, and whose became theirs.
    """

    __slots__ = ("made_of", "n_exact", "salt")

    def __init__(self, salt: bytes) -> None:
        super().__init__(None, b"", None)
        self.salt = salt
        self.n_exact = ALL
        self.made_of: tuple[Origin, ...] = ()

    def learn(self, n_exact: int, made_of: tuple[Origin, ...]) -> None:
        """What somebody knows of the texts under it."""
        self.n_exact = min(self.n_exact, n_exact)
        self.made_of = made_of or self.made_of

    def is_made_of(self, ids: array[int], salt: bytes) -> bool:
        """Whether it is an edit of a text that this one begins with."""
        return any(of.begins(ids, salt) for of in self.made_of)


class Point:
    """A place to go on from, behind some tokens that follow a node's. is_spare: it goes before others do.

    until: as a node's.
    """

    __slots__ = ("is_spare", "node", "p", "resume", "run", "until")

    def __init__(self, node: Node, run: bytes, resume: ResumePoint, is_spare: bool) -> None:
        self.node = node
        self.run = run
        self.resume = resume
        self.is_spare = is_spare
        self.p = resume.p
        self.until = 0.0


def below(root: Root) -> Iterator[Node]:
    """What is behind it, each behind its parent."""
    found: list[Node] = [root]
    for node in found:  # grows meanwhile
        found += node.children.values()
        yield from node.children.values()

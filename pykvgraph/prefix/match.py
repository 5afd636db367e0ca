"""What the index of prefixes finds of a text."""

from __future__ import annotations

from typing import NamedTuple

from pykvgraph.prefix.node import Node, Point, Root


class Match(NamedTuple):
    """How much of a text the index knows.

    path: the root and the nodes whose tokens it begins with. child: the next node where the text goes on as
    this one begins, for `run` tokens, or None. n: tokens in all.
    """

    path: list[Node]
    child: Node | None
    run: int
    n: int

    @property
    def root(self) -> Root:
        """Under which the text is."""
        return self.path[0].root


class Found(NamedTuple):
    """What the cache has of a text: a match, and of that the first n tokens, from which it can go on.

    point: the place to go on from, where the model needs one.
    """

    match: Match
    n: int
    point: Point | None

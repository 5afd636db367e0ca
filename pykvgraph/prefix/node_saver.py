"""Who keeps elsewhere what the index of prefixes gives up."""

from __future__ import annotations

from typing import Protocol

from pykvgraph.prefix.node import Node, Point


class NodeSaver(Protocol):
    """Saves what the index is about to evict; it may still be read."""

    def node(self, node: Node) -> None:
        """Of a node that has a hold."""

    def point(self, point: Point, node: Node) -> None:
        """Of a point, and the node that has the tokens before it."""


def save_leaf(node: Node, saver: NodeSaver, spare_from: int | None = None) -> None:
    """The points that end in it, too: they would lead nowhere without it. spare_from: None: no spare ones."""
    if node.parent is None:
        return
    saver.node(node)
    for run, point in node.parent.points.items():
        is_kept = not point.is_spare or (spare_from is not None and point.p >= spare_from)
        if is_kept and node.tokens.startswith(run):
            saver.point(point, node)

"""Speculation: tokens that may come next are decoded beside the last one, and those that come are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pykvgraph.engine.branch import Branch
from pykvgraph.engine.gate import Gate
from pykvgraph.engine.scheduler import Chunk

MOST_ROWS = 16  # tokens of a step beside which drafts are decoded: with more the device has enough to do


class Drafter(Protocol):
    """Who makes drafts."""

    def drafts(self, asked: Sequence[tuple[Branch, int]], gate: Gate) -> list[list[int]]:
        """For each text at most so many tokens that may follow it."""
        ...

    def learn(self, branch: Branch, n_before: int) -> None:
        """A text has said something; n_before: tokens that it had before."""
        ...


class Speculation:
    """Adds drafts to what a step decodes. Only time is at stake: what texts say stays as it is.

    draft_max: tokens of a draft at most. every: no draft goes beyond such a position, where a resume point is
    kept; 0: none is.
    """

    def __init__(self, drafter: Drafter, draft_max: int, every: int) -> None:
        self.gate = Gate()
        self._drafter = drafter
        self._draft_max = draft_max
        self._every = every

    def add(self, chunks: list[Chunk], room: int) -> list[Chunk]:
        """The chunks, some of them with drafts; room: for how many tokens of drafts there are cells."""
        n_rows = sum(chunk.n for chunk in chunks)
        talking = [chunk.branch for chunk in chunks if chunk.talks and not chunk.branch.forks]
        if not talking:
            return chunks
        asked = []
        for branch in talking:
            most = max(min(self._most(branch), room), 0)
            room -= most
            asked.append((branch, most))
        self.gate.begin(sum(chunk.ends for chunk in chunks), n_rows)
        drafts = self._drafter.drafts(asked, self.gate)
        by_branch = {id(branch): draft for branch, draft in zip(talking, drafts, strict=True)}
        return [chunk._replace(draft=tuple(by_branch.get(id(chunk.branch), ()))) for chunk in chunks]

    def learn(self, branch: Branch, n_before: int) -> None:
        """A text has said something. n_before: tokens that it had before."""
        self._drafter.learn(branch, n_before)

    def time(self, chunks: list[Chunk], seconds: float) -> None:
        """What a step took."""
        if all(chunk.talks for chunk in chunks):
            self.gate.seconds.learn(sum(1 + len(chunk.draft) for chunk in chunks), seconds)

    def _most(self, branch: Branch) -> int:
        most = min(self._draft_max, branch.n_may_say - 1)
        if branch.window is not None:  # as many as it could say without a shift
            most = min(most, branch.window.n_ctx - 2 - branch.n_decoded)
        if self._every:
            most = min(most, -(branch.n_decoded + 1) % self._every)
        return most

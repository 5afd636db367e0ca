"""The texts that run and wait, with their cells and what the index of prefixes keeps of them."""

from __future__ import annotations

import logging

from pykvgraph.context import Context
from pykvgraph.engine.branch import Branch
from pykvgraph.engine.request import Request
from pykvgraph.engine.scheduler import Scheduler
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex, Saver
from pykvgraph.prefix.node import Node

_log = logging.getLogger("pykvgraph")


class Texts:
    """How texts leave, are set aside, and fail: their cells go, or stay in the index for others.

    shares: whether the index keeps anything. needs_points: whether it keeps resume points, as layers with a
    window, or with states, go on from these only.
    """

    def __init__(self, ctx: Context, n_points: int, shares: bool, saver: Saver | None = None) -> None:
        self.shares = shares
        self.needs_points = n_points > 0
        self.index = PrefixIndex(ctx.kv, n_points, saver)
        self.scheduler = Scheduler(ctx.n_seq_max, ctx.n_batch)
        self.kv = ctx.kv
        self.parked: dict[Branch, None] = {}  # a set that keeps its order
        self.n_preempted = 0
        self._ctx = ctx

    def of(self, request: Request) -> list[Branch]:
        """Its samples that run, wait or are parked."""
        waiting, parked = self.scheduler.waiting, self.parked
        return [each for each in request._branches if each.runs or each in waiting or each in parked]

    def remove(self, branch: Branch) -> None:
        """It neither runs nor waits any more, and is not parked."""
        if branch.runs:
            self.leave(branch)
        elif branch in self.parked:
            del self.parked[branch]
        else:
            self.scheduler.waiting.remove(branch)

    def park(self, request: Request) -> bool:
        """Its samples wait for resume(), without sequences; False: it has ended, or is parked already.

        What they have stays in the cache until others need the cells.
        """
        branches = [each for each in self.of(request) if each not in self.parked]
        for branch in branches:
            self.remove(branch)
            self.parked[branch] = None
        return bool(branches)

    def resume(self, request: Request) -> bool:
        """Its samples may run again; False: none of them is parked."""
        branches = [each for each in self.of(request) if each in self.parked]
        for branch in branches:
            del self.parked[branch]
            self.scheduler.wait(branch)
        return bool(branches)

    def leave(self, branch: Branch) -> None:
        """The text's sequence is free again; the index keeps its cells."""
        if branch.fetch is not None:  # what it has so far, the index has
            branch.fetch.job.cancel()
            branch.fetch, branch.n_decoded = None, 0
        is_cut = self.cut(branch)
        if branch.last is not None and self.shares:
            self.keep(branch, to_end=True)
            if self.needs_points and branch.n_decoded and is_cut:
                self.index.add_point(branch.last, branch.ids, branch.n_decoded, branch.seq)
            self.copy(branch, to_end=True)
        self.let_go(branch)
        self.scheduler.leave(branch)

    def let_go(self, branch: Branch) -> None:
        """Its sequence is empty; what others don't need of its cells, the index has alone."""
        if branch.last is not None:
            self._let_go(branch, branch.last)
            branch.last = None
        self.kv.seq_rm(branch.seq, -1, -1)
        branch.n_decoded = branch.n_beyond = 0

    def cut(self, branch: Branch) -> bool:
        """Removes from its sequence what is left of a draft; False: that failed, and it can't go on."""
        if branch.n_beyond:
            try:
                self.kv.seq_rm(branch.seq, branch.n_decoded, -1)
            except (KVGraphError, MemoryError):
                return False
        branch.n_beyond = 0
        return True

    def keep(self, branch: Branch, to_end: bool) -> None:
        """The index holds the text's whole blocks; to_end: and what is behind them."""
        assert branch.last is not None
        n = min(branch.n_decoded, branch.n_true)
        if to_end or n - branch.last.end >= block.N_TOKENS:
            branch.last = self.index.extend(branch.last, branch.ids, n, branch.seq, to_end=to_end)

    def copy(self, branch: Branch, to_end: bool) -> None:
        """Sends the text's new whole blocks to `branch.copies`; to_end: and what is behind them."""
        if branch.copies is None or branch.last is None:
            return
        end = branch.last.end
        if to_end or end > branch.n_copied:
            n = min(branch.n_decoded, branch.n_true) if to_end else end
            try:
                self.index.save_text(
                    branch.ids[:n], branch.salt, branch.n_copied, branch.copies, branch.n_prompt
                )
            # whoever gets them is no part of the engine, which answers others, too
            except Exception as error:
                _log.warning("a text is copied no more: %s: %s", type(error).__name__, error)
                branch.copies = None
            branch.n_copied = end

    def retreat(self, branch: Branch, n: int) -> None:
        """From now on the text needs of what the index has its first n tokens alone."""
        node = last = branch.last
        assert node is not None and last is not None
        while node.end > n:
            assert node.parent is not None
            node = node.parent
        if node is not last:
            self.index.pin(node)
            self._let_go(branch, last)
        branch.last = node

    def set_aside(self, branch: Branch) -> None:
        """It waits again; what it has stays in the cache for as long as nobody needs the cells."""
        self.leave(branch)
        self.scheduler.wait(branch)
        self.n_preempted += 1

    def fail(self, branch: Branch, error: BaseException) -> None:
        """The request ends with the error, all of its samples too."""
        for each in self.of(branch.request):
            self.remove(each)
        branch.request._fail(error)

    def start_over_if_broken(self) -> None:
        """A device that failed in the midst of moving cells has left no cell usable."""
        if self.scheduler.running:
            return
        try:
            self.kv.update()
        except KVGraphError:
            self._ctx.reset()
            self.index = self.index.renewed()

    def _let_go(self, branch: Branch, last: Node) -> None:
        """The text needs what the index has up to this node no longer."""
        others = [each for each in self.scheduler.running if each is not branch]
        self.index.hand_over(last, [(each.last, each.seq) for each in others if each.last])
        self.index.unpin(last)

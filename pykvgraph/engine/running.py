"""The texts that run and wait, with their cells and what the index of prefixes keeps of them."""

from __future__ import annotations

import logging

from pykvgraph.context.context import Context
from pykvgraph.engine.own_rows import OwnRows
from pykvgraph.engine.scheduler import Scheduler
from pykvgraph.engine.sequence import Branch, SampleOwner
from pykvgraph.errors import DeviceError, KVGraphError
from pykvgraph.plan.free_memory import host_free_bytes
from pykvgraph.prefix import block
from pykvgraph.prefix.index import NodeSaver, PrefixIndex
from pykvgraph.prefix.node import Node

_log = logging.getLogger("pykvgraph")
_ROWS_SHARE = 0.5  # of the free host memory, for rows of texts that don't run


class Texts:
    """How texts leave, are set aside, and fail: their cells go, or stay in the index for others.

    shares: whether the index keeps anything. needs_points: whether it keeps resume points, as layers with a
    window, or with states, go on from these only.
    """

    def __init__(self, ctx: Context, n_points: int, shares: bool, saver: NodeSaver | None = None) -> None:
        self.shares = shares
        self.needs_points = n_points > 0
        self.index = PrefixIndex(ctx.kv, n_points, saver, self._copy_one)
        self.scheduler = Scheduler(ctx.n_seq_max, ctx.n_batch)
        self.kv = ctx.kv
        self.parked: dict[Branch, None] = {}  # a set that keeps its order
        self.kept: dict[Branch, None] = {}  # with their own rows in cells, and no sequence; the oldest first
        self.n_preempted = 0
        self._ctx = ctx

    def of(self, request: SampleOwner) -> list[Branch]:
        """Its samples that run, wait or are parked."""
        waiting, parked = self.scheduler.waiting, self.parked
        return [each for each in request._branches if each.runs or each in waiting or each in parked]

    def remove(self, branch: Branch) -> None:
        """It neither runs nor waits any more, and is not parked."""
        if branch in self.parked:
            del self.parked[branch]
        else:
            self._stop(branch)
        self._drop_rows(branch)

    def park(self, request: SampleOwner) -> bool:
        """Its samples wait for resume(), without sequences; False: it has ended, or is parked already.

        What they have stays in the cache until others need the cells. Raises what _keep_rows() raises.
        """
        branches = [each for each in self.of(request) if each not in self.parked]
        for branch in branches:
            self._keep_rows(branch)
            self._stop(branch)
            self.parked[branch] = None
        return bool(branches)

    def resume(self, request: SampleOwner) -> bool:
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
        """It waits again; what it has stays in the cache for as long as nobody needs the cells.

        Its request fails when there is no memory for rows that can't be decoded again.
        """
        try:
            self._keep_rows(branch)
        except (KVGraphError, MemoryError) as error:
            self.fail(branch, error)
            return
        self.leave(branch)
        self.scheduler.wait(branch)
        self.n_preempted += 1

    def put_back(self, branch: Branch, own: OwnRows) -> bool:
        """It runs again, with its own rows; False: there is no room for them now."""
        if not own.n_cells and not self.index.make_room(own.n):
            return False
        self.scheduler.enter(branch)
        try:
            own.show(branch.seq)
        except (KVGraphError, MemoryError) as error:
            self.fail(branch, error)
            self.start_over_if_broken()
            return True
        self._drop_rows(branch)
        branch.n_decoded, branch.last = own.n, self.index.begin(branch.salt)
        return True

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
        except KVGraphError as error:
            self._ctx.reset()
            self.index = self.index.renewed()
            for branch in [*self.kept]:
                self.fail(branch, error)

    def _stop(self, branch: Branch) -> None:
        """It neither runs nor waits any more."""
        if branch.runs:
            self.leave(branch)
        else:
            self.scheduler.waiting.remove(branch)

    def _keep_rows(self, branch: Branch) -> None:
        """Of a text that is about to stop; only one that has shifted needs its rows to go on.

        Raises DeviceError when the host may lack the memory for them, and MemoryError. It still runs then.
        """
        if not (branch.runs and branch.has_shifted):
            return
        # the last token is decoded again for its output, where a grammar has kept it from being used
        n = min(branch.n_decoded, len(branch.ids) - 1)
        n_cells = n + sum(each.own.n for each in self.kept if each.own)
        n_bytes = n_cells * sum(group.cell_bytes for group in self.kv.groups)
        most = int(_ROWS_SHARE * host_free_bytes(self._ctx.model.weight_bytes))
        if n_bytes > most:
            raise DeviceError(
                f"texts that have shifted and don't run would have {n_bytes} bytes of rows, and the host has "
                f"memory for {most}: let others end first, or ask with a smaller window"
            )
        branch.own = OwnRows(self.kv, branch.seq, n)
        self.kept[branch] = None

    def _drop_rows(self, branch: Branch) -> None:
        """It has those that its sequence has, or needs none any more."""
        self.kept.pop(branch, None)
        if branch.own is not None:
            branch.own.give_up()
            branch.own = None

    def _copy_one(self) -> bool:
        """The rows of a text go from the cells to host memory; False: there are none.

        Where they can't be copied, its request fails: it could only go on as another text.
        """
        if not self.kept:
            return False
        branch = next(iter(self.kept))
        assert branch.own is not None
        try:
            branch.own.copy()
            del self.kept[branch]
        except (KVGraphError, MemoryError) as error:
            self.fail(branch, error)
        return True

    def _let_go(self, branch: Branch, last: Node) -> None:
        """The text needs what the index has up to this node no longer."""
        others = [each for each in self.scheduler.running if each is not branch]
        self.index.hand_over(last, [(each.last, each.seq) for each in others if each.last])
        self.index.unpin(last)

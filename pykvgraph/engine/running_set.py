"""The texts that run and wait, with their cells and what the index of prefixes keeps of them."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable

from pykvgraph.context.context import Context
from pykvgraph.engine.block_points import BlockPoints
from pykvgraph.engine.own_rows import OwnRows
from pykvgraph.engine.prepared_text import Preparation, PreparedText
from pykvgraph.engine.request_sequence import RequestSequence, SampleOwner
from pykvgraph.engine.scheduler import Scheduler
from pykvgraph.engine.shortened_texts import ShortenedTexts
from pykvgraph.errors import DeviceError, KVGraphError
from pykvgraph.plan.free_memory import host_free_bytes
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.prefix.node import Node
from pykvgraph.prefix.node_saver import NodeSaver

_log = logging.getLogger("pykvgraph")
_ROWS_SHARE = 0.5  # of the free host memory, for rows of texts that don't run


class RunningSet:
    """How texts leave, are preempted, and fail: their cells go, or stay in the index for others.

    shares: whether the index keeps anything. needs_points: whether it keeps resume points, as layers with a
    window, or with states, go on from these only. block_points: what makes those at the ends of blocks.
    n_pinned: cells that may be pinned for a time. to_prepare: texts that are decoded when nobody waits; the
    last n_seq_max of them.
    """

    def __init__(
        self, ctx: Context, n_points: int, shares: bool, saver: NodeSaver | None = None, n_pinned: int = 0
    ) -> None:
        self.shares = shares
        self.needs_points = n_points > 0
        self.block_points = BlockPoints(ctx)
        n_spare = self.block_points.most if self.block_points.are_kept else 0
        self._most_points = n_points + n_spare
        # cells that are no part of the index, and are wanted longer than its own ones
        self.gives_up: Callable[[], bool] = bool
        self.forgets_made_of: Callable[[array[int], bytes], object] = lambda ids, salt: None
        self.index = PrefixIndex(
            ctx.kv, n_points, saver, self._copy_one, n_spare, n_pinned, lambda: self.gives_up()
        )
        self.scheduler = Scheduler(ctx.n_seq_max, ctx.n_batch)
        self.kv = ctx.kv
        self.parked: dict[RequestSequence, None] = {}  # a set that keeps its order
        # with their own rows in cells, and no sequence; the oldest first
        self.kept: dict[RequestSequence, None] = {}
        self.shortened = ShortenedTexts(ctx.kv, ctx.n_seq_max)
        self.to_prepare: deque[Preparation] = deque(maxlen=ctx.n_seq_max)
        self.n_preempted = 0
        self.context = ctx

    def of(self, request: SampleOwner) -> list[RequestSequence]:
        """Its samples that run, wait or are parked."""
        waiting = self.scheduler.waiting
        return [each for each in request._sequences if each.runs or each.is_parked or each in waiting]

    def remove(self, sequence: RequestSequence) -> None:
        """It neither runs nor waits any more, and is not parked."""
        if sequence.is_parked:
            self._unpark(sequence)
        else:
            self._stop(sequence)
        self._drop_rows(sequence)

    def cancel(self, request: SampleOwner) -> None:
        """Its samples end."""
        now = time.perf_counter()
        for sequence in self.of(request):
            self._keep_shortened(sequence)
            self.remove(sequence)
            sequence.cancel(now)

    def park(self, request: SampleOwner) -> bool:
        """Its samples wait for resume(), without sequences; False: it has ended, or is parked already.

        What they have stays in the cache until others need the cells. Raises what _keep_rows() raises.
        """
        sequences = [each for each in self.of(request) if not each.is_parked]
        for sequence in sequences:
            self._keep_rows(sequence)
            self._stop(sequence)
            sequence.start_over()
            self.parked[sequence], sequence.is_parked = None, True
        return bool(sequences)

    def resume(self, request: SampleOwner) -> bool:
        """Its samples may run again; False: none of them is parked."""
        sequences = [each for each in self.of(request) if each.is_parked]
        for sequence in sequences:
            self._unpark(sequence)
            self.scheduler.wait(sequence)
        return bool(sequences)

    def leave(self, sequence: RequestSequence) -> None:
        """The text's sequence is free again; the index keeps its cells."""
        if sequence.fetch is not None:  # what it has so far, the index has
            sequence.fetch.job.cancel()
            sequence.fetch, sequence.n_decoded = None, 0
        is_cut = self.cut(sequence)
        if sequence.last is not None and self.shares:
            self.keep(sequence, to_end=True)
            if self.needs_points and is_cut and 0 < sequence.n_decoded == sequence.n_shareable:
                self._add_last_point(sequence)
            self.copy(sequence, to_end=True)
        self.release(sequence)
        self.scheduler.leave(sequence)

    def end(self, sequence: RequestSequence) -> None:
        """As leave(), when it has said all: a text that has shifted stays for one that goes on from it."""
        self._keep_shortened(sequence)
        self.leave(sequence)

    def _keep_shortened(self, sequence: RequestSequence) -> None:
        if self.shares:
            self.shortened.add(sequence)

    def go_on(self, sequence: RequestSequence) -> None:
        """A new text gets the rows of one that has shifted, if it begins with that."""
        n_had = self.index.find(sequence.ids, sequence.n_findable, sequence.exact_salt).n
        if self.shortened.take(sequence, n_had) and sequence.own is not None and sequence.own.n_cells:
            self.kept[sequence] = None

    @property
    def is_full_of_points(self) -> bool:
        """Whether a new resume point takes the place of another one."""
        return self.index.n_points >= self._most_points

    def _add_last_point(self, sequence: RequestSequence) -> None:
        """Where the text ends; of one that is prepared in an empty place, or that of its old text."""
        is_spare = False
        if isinstance(sequence, PreparedText):
            if self.is_full_of_points:
                self.give_up_old(sequence)
            is_spare = self.is_full_of_points or sequence.n_decoded < sequence.n_prompt
        assert sequence.last is not None
        self.index.add_point(sequence.last, sequence.ids, sequence.n_decoded, sequence.seq, is_spare=is_spare)

    def give_up_old(self, sequence: RequestSequence) -> bool:
        """Of a text that is prepared, the old one loses what it has for itself; False: there is nothing."""
        if not isinstance(sequence, PreparedText):
            return False
        salts, sequence.old_salts = sequence.old_salts, ()
        return sum(self.index.forget(sequence.old, salt, sequence.n_common) for salt in salts) > 0

    def forget(self, ids: array[int], salt: bytes) -> int:
        """Gives up what there is of a text, and what was made of it; how many of its own tokens that were.

        What was to be prepared behind it isn't, and the part that is goes, too.
        """
        for each in [each for each in self.to_prepare if each.is_of(ids, salt)]:
            self.to_prepare.remove(each)
            self.index.forget(each.ids, salt)
        self.shortened.forget(ids, salt)
        self.forgets_made_of(ids, salt)
        self.index.forget_edited(ids, salt)
        return self.index.forget(ids, salt)

    def forget_preparations(self, sequence: RequestSequence) -> None:
        """Those that a text begins with which is decoded now."""
        ids, salt = sequence.ids, sequence.exact_salt
        left = [each for each in self.to_prepare if not each.begins(ids, salt)]
        self.to_prepare.clear()
        self.to_prepare.extend(left)

    def release(self, sequence: RequestSequence) -> None:
        """Its sequence is empty; what others don't need of its cells, the index has alone."""
        if sequence.last is not None:
            self._release(sequence, sequence.last)
            sequence.last = None
        for seq in (sequence.seq, *sequence.fork_seqs):
            self.kv.seq_rm(seq, -1, -1)
        sequence.empty()

    def cut(self, sequence: RequestSequence) -> bool:
        """Removes from its sequence what is left of a draft; False: that failed, and it can't go on."""
        if sequence.n_beyond:
            try:
                self.kv.seq_rm(sequence.seq, sequence.n_decoded, -1)
            except (KVGraphError, MemoryError):
                return False
        sequence.n_beyond = 0
        return True

    def keep(self, sequence: RequestSequence, to_end: bool) -> None:
        """The index holds the text's whole blocks; to_end: and what is behind them."""
        assert sequence.last is not None
        n = sequence.n_shareable
        if to_end or n - sequence.last.end >= block.N_TOKENS:
            sequence.last = self.index.extend(sequence.last, sequence.ids, n, sequence.seq, to_end=to_end)

    def pin(self, sequence: RequestSequence) -> None:
        """Pins what its request wants pinned, as soon as its prompt is decoded."""
        last = sequence.last
        is_due = sequence.pins and not sequence.pinned and sequence.n_decoded >= sequence.n_prompt
        if is_due and last is not None:
            sequence.pinned = tuple(
                self.index.pin_for(last, sequence.ids, pin.n_tokens, pin.seconds) for pin in sequence.pins
            )

    def copy(self, sequence: RequestSequence, to_end: bool) -> None:
        """Sends the text's new whole blocks to `sequence.copies`; to_end: and what is behind them.

        Nothing of one that has approximate cells: nobody would find it.
        """
        if sequence.copies is None or sequence.last is None or sequence.salt != sequence.exact_salt:
            return
        end = sequence.last.end
        if to_end or end > sequence.n_copied:
            n = sequence.n_shareable if to_end else end
            try:
                self.index.save_text(
                    sequence.ids[:n], sequence.salt, sequence.n_copied, sequence.copies, sequence.n_prompt
                )
            # whoever gets them is no part of the engine, which answers others, too
            except Exception as error:
                _log.warning("a text is copied no more: %s: %s", type(error).__name__, error)
                sequence.copies = None
            sequence.n_copied = end

    def retreat(self, sequence: RequestSequence, n: int) -> None:
        """From now on the text needs of what the index has its first n tokens alone."""
        node = last = sequence.last
        assert node is not None and last is not None
        while node.end > n:
            assert node.parent is not None
            node = node.parent
        if node is not last:
            self.index.pin(node)
            self._release(sequence, last)
        sequence.last = node

    def preempt(self, sequence: RequestSequence) -> None:
        """It waits again; what it has stays in the cache for as long as nobody needs the cells.

        Its request fails when there is no memory for rows that can't be decoded again.
        """
        try:
            self._keep_rows(sequence)
        except (KVGraphError, MemoryError) as error:
            self.fail(sequence, error)
            return
        self.leave(sequence)
        sequence.start_over()
        self.scheduler.wait(sequence)
        self.n_preempted += 1

    def put_back(self, sequence: RequestSequence, own: OwnRows) -> bool:
        """It runs with its own rows, or has lost them; False: there is no room for them now."""
        is_alone = not self.scheduler.running
        if not own.n_cells and not self.index.make_room(own.n_rows, takes_pinned=is_alone):
            return False
        self.scheduler.enter(sequence)
        try:
            own.show(sequence.seq)
        except (KVGraphError, MemoryError) as error:
            self._lose_rows(sequence, error)
            self.start_over_if_broken()
            return True
        self._drop_rows(sequence)
        root = self.index.begin(sequence.salt, own.root.n_exact, own.root.made_of)
        sequence.n_decoded, sequence.last = own.n, root
        return True

    def fail(self, sequence: RequestSequence, error: BaseException) -> None:
        """The request ends with the error, all of its samples too."""
        for each in self.of(sequence.request):
            self.remove(each)
        sequence.request._fail(error)

    def start_over_if_broken(self) -> None:
        """A device that failed in the midst of moving cells has left no cell usable."""
        if self.scheduler.running:
            return
        try:
            self.kv.update()
        except KVGraphError as error:
            self.context.reset()
            self.shortened.clear()
            self.index = self.index.renewed()
            for sequence in [*self.kept]:
                self._lose_rows(sequence, error)

    def _unpark(self, sequence: RequestSequence) -> None:
        del self.parked[sequence]
        sequence.is_parked = False

    def _stop(self, sequence: RequestSequence) -> None:
        """It neither runs nor waits any more."""
        if sequence.runs:
            self.leave(sequence)
        else:
            self.scheduler.waiting.remove(sequence)

    def _keep_rows(self, sequence: RequestSequence) -> None:
        """Of a text that is about to stop; only one that has shifted needs its rows to go on.

        Raises DeviceError when the host may lack the memory for them, and MemoryError. It still runs then.
        """
        if not (sequence.runs and sequence.has_shifted):
            return
        if self.kv.ages:
            raise DeviceError(
                "texts that have shifted can't stop and go on where rows age: such rows stay in the cache; "
                "let others end first, or use one type for K and one for V"
            )
        # the last token is decoded again for its output, where a grammar has kept it from being used
        n = min(sequence.n_decoded, len(sequence.ids) - 1)
        n_cells = n + sum(each.own.n_cells for each in self.kept if each.own)
        n_bytes = n_cells * sum(group.cell_bytes for group in self.kv.groups)
        most = self._most_row_bytes
        if n_bytes > most:
            raise DeviceError(
                f"texts that have shifted and don't run would have {n_bytes} bytes of rows, and the host has "
                f"memory for {most}: let others end first, or ask with a smaller window"
            )
        assert sequence.last is not None
        sequence.own = OwnRows(self.kv, sequence.seq, n, sequence.last.root)
        self.kept[sequence] = None

    @property
    def _most_row_bytes(self) -> int:
        """Of rows in host memory."""
        return int(_ROWS_SHARE * host_free_bytes(self.context.model.weight_bytes))

    def _drop_rows(self, sequence: RequestSequence) -> None:
        """It has those that its sequence has, or needs none any more."""
        self.kept.pop(sequence, None)
        if sequence.own is not None:
            sequence.own.give_up()
            sequence.own = None

    def _copy_one(self) -> bool:
        """The rows of a text go from the cells to host memory; False: there are none.

        Where they can't be copied, they are lost.
        """
        if not self.kept:
            return self.shortened.copy_one(lambda: self._most_row_bytes)
        sequence = next(iter(self.kept))
        assert sequence.own is not None
        try:
            sequence.own.copy()
            del self.kept[sequence]
        except (KVGraphError, MemoryError) as error:
            self._lose_rows(sequence, error)
        return True

    def _lose_rows(self, sequence: RequestSequence, error: BaseException) -> None:
        """A text that has not run yet is read from its beginning; another one fails: it could only go on as
        another text."""
        if sequence.n_cached >= 0:
            self.fail(sequence, error)
            return
        if sequence.runs:
            self.leave(sequence)
            self.scheduler.wait(sequence)
        self._drop_rows(sequence)
        sequence.go_back()

    def _release(self, sequence: RequestSequence, last: Node) -> None:
        """The text needs what the index has up to this node no longer."""
        others = [each for each in self.scheduler.running if each is not sequence]
        self.index.hand_over(last, [(each.last, each.seq) for each in others if each.last])
        self.index.unpin(last)

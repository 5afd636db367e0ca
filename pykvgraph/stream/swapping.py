"""Texts that don't fit into the cache together take turns in two slots of it: `Swapping`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING

from pykvgraph.checks import integer
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.receive import stream_in
from pykvgraph.stream.send import stream_out

if TYPE_CHECKING:
    from typing_extensions import Self


class Swapping:
    """Any number of texts in two sequences of a context.

    While one computes, the one before it leaves its slot and the next one comes:

        with stream.Swapping(ctx, ways) as texts:
            for _ in range(n):
                for text, seq in texts.turns():
                    ctx.append(tokens[text], seq)

    ways: for each text the layouts through which it leaves and comes back: of the two ends of a memory: or of
    a directory file:, which must hold it. slots: two sequences without cells, of which n_ctx must have room.
    Raises InvalidArgumentError, and in turns() what `stream_out` and `stream_in` raise; then the text that
    was on its way is lost, and the others are where they were.
    """

    def __init__(
        self, ctx: Context, ways: Sequence[tuple[Layout, Layout]], slots: tuple[int, int] = (0, 1)
    ) -> None:
        self._ctx, self._ways = ctx, list(ways)
        self._slots = [integer(seq, "a slot", 0, ctx.n_seq_max - 1) for seq in slots]
        if len(set(self._slots)) != 2 or any(ctx.kv.seq_pos_max(seq) >= 0 for seq in self._slots):
            raise InvalidArgumentError(f"slots must be two sequences without cells, got {slots}")
        self._inside: list[int | None] = [None, None]  # the text in each slot
        self._away: set[int] = set()
        self._coming: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "pykvgraph swapping")

    def turns(self) -> Iterator[tuple[int, int]]:
        """One round: each text, and the sequence that it is in until the next one's turn."""
        n = len(self._ways)
        for text in range(n):
            self._settle()
            if text not in self._inside:  # the first one of all
                self._swap(text, 0)
            slot = self._inside.index(text)
            if (text + 1) % n not in self._inside:
                self._coming = self._thread.submit(self._swap, (text + 1) % n, 1 - slot)
            yield text, self._slots[slot]

    def close(self) -> None:
        """Waits for what is on its way. The texts stay where they are."""
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self._settle()

    def _settle(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.result()

    def _swap(self, text: int, slot: int) -> None:
        """The text comes into the slot, and who is there leaves it."""
        seq, leaving = self._slots[slot], self._inside[slot]
        if leaving is not None:
            stream_out(self._ctx, seq, self._ways[leaving][0])
            self._ctx.kv.seq_rm(seq, -1, -1)
            self._away.add(leaving)
        self._inside[slot] = None
        if text in self._away:
            self._away.remove(text)
            stream_in(self._ctx, seq, self._ways[text][1])
        self._inside[slot] = text

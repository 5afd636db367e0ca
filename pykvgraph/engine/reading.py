"""A text that is decoded for what it says about its tokens, and not to be continued."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.errors import CacheFullError
from pykvgraph.model.adapter import Active
from pykvgraph.prefix.index import PrefixIndex

_N_ROWS = 64  # tokens with outputs in one batch, as each output has logits, too


class Reading:
    """Decoded a part at a time, between the steps of others; `done` has a list of what take() returned.

    take(begin, end): called behind each part that has outputs, ids[begin:end], whose outputs the context has
    then. outputs: of "all" tokens, or of the "last" one. scores: as Context.decode() has it. salt: the index
    keeps the text under it for whoever comes back to it; None: nothing is kept. is_wanted: asked before each
    part; False ends it, with what there is by then. seq: that it has while it is read, else -1.
    """

    def __init__(
        self,
        ids: array[int],
        adapters: Active,
        take: Callable[[int, int], Any],
        is_wanted: Callable[[], bool],
        *,
        outputs: Literal["all", "last"] = "all",
        scores: bool = False,
        salt: bytes | None = None,
    ) -> None:
        self.ids = ids
        self.n_read = 0
        self.seq = -1
        self.done: Future[list[Any]] = Future()
        self.is_wanted = is_wanted
        self._adapters = adapters
        self._take = take
        self._outputs = outputs
        self._scores = scores
        self._salt = salt
        self._found: list[Any] = []

    @property
    def n_left(self) -> int:
        """Tokens that are not decoded."""
        return len(self.ids) - self.n_read

    def n_next(self, most: int) -> int:
        """How many tokens one call of read() may decode, of `most` that there is time for."""
        return min(most, self.n_left, _N_ROWS if self._outputs == "all" else self.n_left)

    def read(self, ctx: Context, index: PrefixIndex, n: int) -> None:
        """Decodes the next n tokens. Raises CacheFullError, and what Context.decode raises."""
        begin, end = self.n_read, self.n_read + n
        if not index.make_room(n, takes_pinned=True):
            raise CacheFullError(f"the text has {len(self.ids)} tokens, and there is no room for it now")
        ends = end == len(self.ids)
        wanted = self._outputs if ends or self._outputs == "all" else False
        batch = Batch()
        batch.extend(self.ids[begin:end], begin, (self.seq,), wanted)
        ctx.set_adapters(self._adapters)
        index.with_points_room(lambda: ctx.decode(batch, scores=self._scores), end - begin)
        self.n_read = end
        if wanted:
            self._found.append(self._take(begin, end))
        if ends and self._salt is not None:
            index.keep(self.ids, end, self.seq, self._salt)

    def tell(self) -> None:
        """It is over: whoever waits gets what there is."""
        self.done.set_result(self._found)

    def give_up(self) -> None:
        """Nobody waits for it any more; from any thread."""
        self.is_wanted = lambda: False

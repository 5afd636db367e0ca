"""What callers send to the engine, from any thread, for the one who takes the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pykvgraph.engine.reading import Reading
from pykvgraph.engine.request import Request
from pykvgraph.engine.running import Texts
from pykvgraph.engine.sequence import Branch
from pykvgraph.engine_types import EngineLook
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix.index import PrefixIndex


class Errand:
    """do(index, seq) is called once, by whoever takes the steps; `done` has what it returned or raised.

    seq is empty before, and is emptied behind it.
    """

    def __init__(self, do: Callable[[PrefixIndex, int], Any]) -> None:
        self._do = do
        self.done: Future[Any] = Future()

    def run(self, index: PrefixIndex, seq: int) -> None:
        """Does it."""
        try:
            self.done.set_result(self._do(index, seq))
        except Exception as error:
            self.done.set_exception(error)


class Parking:
    """What a caller asks for. parks: False: it is to come back. done: whether there was anything to do."""

    def __init__(self, request: Request, parks: bool) -> None:
        self.request = request
        self.parks = parks
        self.done: Future[bool] = Future()

    def run(self, texts: Texts) -> None:
        """Does it, between two steps; `done` has what came of it."""
        try:
            self.done.set_result(texts.park(self.request) if self.parks else texts.resume(self.request))
        except (KVGraphError, MemoryError) as error:
            self.done.set_exception(error)


_ERRAND_SECONDS = 0.02  # in a step, after which no further errand begins


class Mail:
    """Texts that come, requests that are cancelled, errands, and those who want to look.

    news: what was sent and not read yet; any thread may append to it.
    """

    def __init__(self) -> None:
        self.news: deque[Branch | Request | Parking | Reading | Errand | Future[EngineLook]] = deque()
        self._errands: deque[Errand] = deque()
        self._lookers: list[Future[EngineLook]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits for anything, but perhaps to look."""
        return not (self.news or self._errands)

    @property
    def n_branches(self) -> int:
        """Texts that were sent and not read yet."""
        return sum(isinstance(each, Branch) for each in tuple(self.news))

    def read(self) -> list[Branch | Request | Parking | Reading]:
        """Texts that came, and requests to cancel, to park or to resume; others wait for their turn."""
        found: list[Branch | Request | Parking | Reading] = []
        for _ in range(len(self.news)):  # what comes meanwhile is for the next step
            new = self.news.popleft()
            if isinstance(new, Errand):
                self._errands.append(new)
            elif isinstance(new, Future):
                self._lookers.append(new)
            else:
                found.append(new)
        return found

    def run_errands(self, texts: Texts) -> None:
        """Those that there is a free sequence and time for; others wait for the next step."""
        end = time.monotonic() + _ERRAND_SECONDS
        while self._errands and texts.scheduler.n_free_seqs:
            seq = texts.scheduler.borrow()
            try:
                self._errands.popleft().run(texts.index, seq)
            finally:
                texts.kv.seq_rm(seq, -1, -1)
                texts.scheduler.give_back(seq)
            texts.start_over_if_broken()
            if time.monotonic() >= end:
                return

    def show(self, look: Callable[[], EngineLook]) -> None:
        """Tells those who look what there is."""
        if not self._lookers:
            return
        lookers, self._lookers = self._lookers, []
        try:
            found = look()
        except Exception as error:
            for each in lookers:
                each.set_exception(error)
        else:
            for each in lookers:
                each.set_result(found)

    def end(self, error: BaseException) -> list[Branch]:
        """Everybody hears the error; returns the texts not read yet."""
        new = [each for each in self.news if isinstance(each, Branch)]
        kinds = Errand, Parking, Reading
        asked = [each.done for each in (*self._errands, *self.news) if isinstance(each, kinds)]
        asked += [*self._lookers, *(each for each in self.news if isinstance(each, Future))]
        self._errands.clear()
        self._lookers.clear()
        self.news.clear()
        for future in asked:
            future.set_exception(error)
        return new

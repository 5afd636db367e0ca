"""What callers send to the engine, from any thread, for the one who takes the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pykvgraph.engine.reading import Reading
from pykvgraph.engine.request import Request
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine_types import EngineLook
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix.index import PrefixIndex


class CellCommand:
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


class ParkCommand:
    """What a caller asks for. parks: False: it is to come back. done: whether there was anything to do."""

    def __init__(self, request: Request, parks: bool) -> None:
        self.request = request
        self.parks = parks
        self.done: Future[bool] = Future()

    def run(self, running_set: RunningSet) -> None:
        """Does it, between two steps; `done` has what came of it."""
        try:
            self.done.set_result(
                running_set.park(self.request) if self.parks else running_set.resume(self.request)
            )
        except (KVGraphError, MemoryError) as error:
            self.done.set_exception(error)


_CELL_COMMAND_SECONDS = 0.02  # in a step, after which no further one begins


class CommandQueue:
    """Texts that come, requests that are cancelled, commands for cells, and those who want to look.

    news: what was sent and not read yet; any thread may append to it.
    """

    def __init__(self) -> None:
        self.news: deque[
            RequestSequence | Request | ParkCommand | Reading | CellCommand | Future[EngineLook]
        ] = deque()
        self._for_cells: deque[CellCommand] = deque()
        self._lookers: list[Future[EngineLook]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits for anything, but perhaps to look."""
        return not (self.news or self._for_cells)

    @property
    def n_sequences(self) -> int:
        """Texts that were sent and not read yet."""
        return sum(isinstance(each, RequestSequence) for each in tuple(self.news))

    def read(self) -> list[RequestSequence | Request | ParkCommand | Reading]:
        """Texts that came, and requests to cancel, to park or to resume; others wait for their turn."""
        found: list[RequestSequence | Request | ParkCommand | Reading] = []
        for _ in range(len(self.news)):  # what comes meanwhile is for the next step
            new = self.news.popleft()
            if isinstance(new, CellCommand):
                self._for_cells.append(new)
            elif isinstance(new, Future):
                self._lookers.append(new)
            else:
                found.append(new)
        return found

    def run_cell_commands(self, running_set: RunningSet) -> None:
        """Those that there is a free sequence and time for; others wait for the next step."""
        end = time.monotonic() + _CELL_COMMAND_SECONDS
        while self._for_cells and running_set.scheduler.n_free_seqs:
            seq = running_set.scheduler.borrow()
            try:
                self._for_cells.popleft().run(running_set.index, seq)
            finally:
                running_set.kv.seq_rm(seq, -1, -1)
                running_set.scheduler.give_back(seq)
            running_set.start_over_if_broken()
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

    def end(self, error: BaseException) -> list[RequestSequence]:
        """Everybody hears the error; returns the texts not read yet."""
        new = [each for each in self.news if isinstance(each, RequestSequence)]
        kinds = CellCommand, ParkCommand, Reading
        asked = [each.done for each in (*self._for_cells, *self.news) if isinstance(each, kinds)]
        asked += [*self._lookers, *(each for each in self.news if isinstance(each, Future))]
        self._for_cells.clear()
        self._lookers.clear()
        self.news.clear()
        for future in asked:
            future.set_exception(error)
        return new

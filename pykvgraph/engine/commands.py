"""What callers send to the engine, from any thread, for the one who takes the steps."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pykvgraph.engine.prepared_text import Preparation
from pykvgraph.engine.reading import Reading
from pykvgraph.engine.readings import Readings
from pykvgraph.engine.request import Request
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.engine.types import EngineLook
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix.index import PrefixIndex


class Command:
    """Something that is to be done between two steps. done: has what came of it, or why it can't be done."""

    def __init__(self) -> None:
        self.done: Future[Any] = Future()

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """Does it."""
        raise NotImplementedError


class Submit(Command):
    """A text is to be answered."""

    def __init__(self, sequence: RequestSequence) -> None:
        super().__init__()
        self.sequence = sequence

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """It waits to run. What was to be prepared of it is decoded with it."""
        running_set.forget_preparations(self.sequence)
        running_set.scheduler.arrive(self.sequence)


class Prepare(Command):
    """A text is to be decoded while nobody waits."""

    def __init__(self, preparation: Preparation) -> None:
        super().__init__()
        self._preparation = preparation

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """It is prepared behind the others; of too many, the first is forgotten."""
        if self._preparation not in running_set.to_prepare:
            running_set.to_prepare.append(self._preparation)


class Cancel(Command):
    """A request is to end."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._request = request

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """Its samples end, wherever they are."""
        running_set.cancel(self._request)


class Park(Command):
    """A request is to wait until it is resumed, or is resumed (parks False).

    done: whether there was anything to do.
    """

    def __init__(self, request: Request, parks: bool) -> None:
        super().__init__()
        self._request = request
        self._parks = parks

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """`done` has the error of what can't be kept."""
        try:
            change = running_set.park if self._parks else running_set.resume
            self.done.set_result(change(self._request))
        except (KVGraphError, MemoryError) as error:
            self.done.set_exception(error)


class Read(Command):
    """A text is to be decoded for what it says about its tokens."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.done = reading.done
        self._reading = reading

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """It is read behind the others."""
        readings.add(self._reading)


class ForgetText(Command):
    """The cells that the cache has of a text are to be empty. done: how many tokens that were."""

    def __init__(self, ids: array[int], salt: bytes) -> None:
        super().__init__()
        self._ids = ids
        self._salt = salt

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """What was made of it goes, too."""
        self.done.set_result(running_set.forget(self._ids, self._salt))


class CellCommand(Command):
    """do(index, seq) is to be called; `done` has what it returned or raised.

    seq is an empty sequence, and is emptied behind it.
    """

    def __init__(self, do: Callable[[PrefixIndex, int], Any]) -> None:
        super().__init__()
        self._do = do

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """Needs a free sequence."""
        seq = running_set.scheduler.borrow()
        try:
            self.done.set_result(self._do(running_set.index, seq))
        except Exception as error:
            self.done.set_exception(error)
        finally:
            running_set.kv.seq_rm(seq, -1, -1)
            running_set.scheduler.give_back(seq)
        running_set.start_over_if_broken()


class Look(Command):
    """Somebody wants to know how it is: `done` has an EngineLook."""


_CELL_COMMAND_SECONDS = 0.02  # in a step, after which no further one begins


class CommandQueue:
    """Commands in the order in which they came.

    new: what was sent and not read yet; any thread may append to it.
    """

    def __init__(self) -> None:
        self.new: deque[Command] = deque()
        self._for_cells: deque[CellCommand] = deque()
        self._looks: list[Look] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits for anything, but perhaps to look."""
        return not (self.new or self._for_cells)

    @property
    def has_work(self) -> bool:
        """Whether somebody wants what only the one who takes the steps can do; to look is not."""
        return any(not isinstance(each, Look | Prepare) for each in tuple(self.new)) or bool(self._for_cells)

    @property
    def n_sequences(self) -> int:
        """Texts that were sent and not read yet."""
        return sum(isinstance(each, Submit) for each in tuple(self.new))

    def run(self, running_set: RunningSet, readings: Readings) -> None:
        """Does what has come. Who wants a sequence for a while waits until one is free, and there is time."""
        for _ in range(len(self.new)):  # what comes meanwhile is for the next step
            command = self.new.popleft()
            if isinstance(command, CellCommand):
                self._for_cells.append(command)
            elif isinstance(command, Look):
                self._looks.append(command)
            else:
                command.run(running_set, readings)
        end = time.monotonic() + _CELL_COMMAND_SECONDS
        while self._for_cells and running_set.scheduler.n_free_seqs:
            self._for_cells.popleft().run(running_set, readings)
            if time.monotonic() >= end:
                return

    def show(self, look: Callable[[], EngineLook]) -> None:
        """Tells those who look what there is."""
        if not self._looks:
            return
        looks, self._looks = self._looks, []
        try:
            found = look()
        except Exception as error:
            for each in looks:
                each.done.set_exception(error)
        else:
            for each in looks:
                each.done.set_result(found)

    def end(self, error: BaseException) -> list[RequestSequence]:
        """Everybody hears the error; returns the texts not read yet."""
        left: list[Command] = [*self.new, *self._for_cells, *self._looks]
        self.new.clear()
        self._for_cells.clear()
        self._looks.clear()
        for each in left:
            each.done.set_exception(error)
        return [each.sequence for each in left if isinstance(each, Submit)]

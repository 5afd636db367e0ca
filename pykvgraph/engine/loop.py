"""Who takes the engine's steps: a thread of its own, or the program."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from pykvgraph.context.context import Context
from pykvgraph.engine.commands import Cancel, CellCommand, Command, Look, Read
from pykvgraph.engine.ctrl_c import ctrl_c_waits
from pykvgraph.engine.reading import Reading
from pykvgraph.engine.request import Request
from pykvgraph.engine.step import Stepper
from pykvgraph.engine.types import EngineLook
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.prefix.index import PrefixIndex


class Loop:
    """Takes the steps: in a thread of its own, or when it is told to. The engine owns it."""

    def __init__(self, context: Context, stepper: Stepper, background: bool) -> None:
        self.context = context
        self.stepper = stepper
        self.background = background
        self._closed = False
        self._pid = os.getpid()
        self._news = threading.Condition()
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="pykvgraph engine", daemon=True)
            self._thread.start()

    def give(self, command: Command) -> None:
        """It is done before the next step. Raises InvalidArgumentError when the engine is closed."""
        with self._news:
            if self._closed or os.getpid() != self._pid:
                raise InvalidArgumentError("the engine is closed: make a new one")
            self.stepper.commands.new.append(command)
            self._news.notify()

    @property
    def closed(self) -> bool:
        """Whether nobody can come any more: by close(), or by an error in the midst of a step."""
        return self._closed

    def ask(self, command: Command) -> Any:
        """Waits for what comes of it; without a thread of its own, takes the steps meanwhile."""
        self.give(command)
        while not self.background and not command.done.done():
            self.step()
        return command.done.result()

    def run_between_steps(self, do: Callable[[PrefixIndex, int], Any]) -> Any:
        """What do(index, seq) returns, which is called between two steps, with an empty sequence."""
        return self.ask(CellCommand(do))

    def read(self, reading: Reading) -> list[Any]:
        """In parts, between the steps of others. Ctrl-C ends it."""
        try:
            found: list[Any] = self.ask(Read(reading))
        except BaseException:
            reading.give_up()
            raise
        return found

    def look(self) -> EngineLook:
        """Between two steps; without a thread of its own there is no step now."""
        if self.background:
            # not by the lock: the thread that takes the steps would take it again at once
            found: EngineLook = self.ask(Look())
            return found
        with self._stepping:
            if self._closed:
                raise InvalidArgumentError("the engine is closed: make a new one")
            return self.stepper.look()

    def cancel(self, request: Request) -> None:
        """For Request.cancel()."""
        if not request.done:
            with contextlib.suppress(InvalidArgumentError):  # closed: everything is cancelled
                self.give(Cancel(request))

    def step(self) -> bool:
        """One step; whether there is more to do. An exception in the midst of it closes the engine."""
        with self._stepping, ctrl_c_waits():
            if self._closed:
                return False
            try:
                self.stepper.step()
            except BaseException as error:  # the second Ctrl-C, perhaps
                self._end(error)
                raise
            return not self.stepper.is_idle

    def close(self) -> None:
        """Ends the thread, then every request, and closes the context."""
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is threading.current_thread():
            return  # the garbage collector runs in the midst of a step: the thread does the rest behind it
        if self._thread is not None:
            self._thread.join()
        with self._stepping:
            self._end(None)
            self.stepper.close()

    def _run(self) -> None:
        try:
            while self._waits_for_work():
                with self._stepping:
                    self.stepper.step()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)
            self.stepper.close()

    def _waits_for_work(self) -> bool:
        """False: the engine is closed."""
        with self._news:
            while self.stepper.is_idle and not self._closed:
                self._news.wait()
            return not self._closed

    def _end(self, error: BaseException | None) -> None:
        """Nobody comes any more, and whoever waits hears why."""
        with self._news:
            self._closed = True
        self.stepper.end_all(error)


def close_loop(loop: Loop) -> None:
    """Closes it; in a forked process, where its thread is not, only what can be."""
    if os.getpid() == loop._pid:
        loop.close()
    else:
        loop.stepper.abandon()

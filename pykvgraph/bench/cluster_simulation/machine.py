"""A simulated worker: an engine of which only the seconds of its steps are left."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from pykvgraph.bench.cluster_simulation.traffic import SimulatedRequest
from pykvgraph.plan.time_model import TimeModel, cells_of_run

CHUNK = 64  # tokens of a prompt that a step decodes beside the texts that talk, as an engine does


@dataclass(eq=False, slots=True)
class SimulatedText:
    """A request on its way.

    n_prompt: tokens. n_answer: those that are wanted. n_cached: tokens of the prompt that need no decoding.
    n_read: those that need none any more. n_said: tokens of the answer. came, first, last: seconds of the
    clock, when it was asked, and when its first and its last token came. gap: seconds, the longest between
    two tokens.
    """

    asked: SimulatedRequest
    came: float
    n_prompt: int
    n_answer: int
    n_cached: int = 0
    n_read: int = 0
    n_said: int = 0
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0

    @property
    def token_seconds(self) -> float:
        """Of a token after the first one; at least two are wanted."""
        return (self.last - self.first) / (self.n_answer - 1)


class Machine:
    """Texts in slots, all in step; of those whose prompts are read, the one with least left is read first.

    Steps that are alike are one phase, of which the seconds come from the middle one. A text that comes
    waits for the end of the step; while its cells are loaded, all wait.
    """

    def __init__(self, times: TimeModel, n_slots: int) -> None:
        self.seconds_busy = 0.0
        self._times = times
        self._n_slots = n_slots
        self._texts: list[SimulatedText] = []
        self._waiting: deque[SimulatedText] = deque()
        self._reader: SimulatedText | None = None
        self._chunk = 0  # tokens of its prompt in each step
        self._begin = 0.0  # of the phase
        self._stop = 0.0  # seconds before it, in which cells were loaded
        self._step = 0.0  # seconds
        self._n_steps = 0  # of the phase; 0: there is none

    def enter(self, text: SimulatedText, now: float) -> None:
        """It comes. Ask end() anew."""
        self._waiting.append(text)
        if not self._n_steps:
            self._begin = now
            self._plan()
            return
        if len(self._texts) < self._n_slots:
            n_done = min(max(math.ceil((now - self._begin) / self._step), 0), self._n_steps)
            if n_done < self._n_steps:
                self._pass(n_done)
                self._plan()

    def end(self) -> float:
        """When the phase ends; infinity: nobody is answered."""
        return self._begin + self._n_steps * self._step if self._n_steps else math.inf

    def step(self) -> tuple[SimulatedText | None, list[SimulatedText]]:
        """The phase has ended: the one whose prompt is read now, and those that are answered."""
        self._pass(self._n_steps)
        read = self._reader
        if read and read.n_read == read.n_prompt:
            read.first = self._begin
            read.n_said = 1
        else:
            read = None
        answered = [text for text in self._texts if text.n_said >= text.n_answer]
        for text in answered:
            text.last = self._begin
            self._texts.remove(text)
        self._plan()
        return read, answered

    def cached(self, text: SimulatedText) -> tuple[int, float]:
        """Tokens of the prompt that are there when it enters, and seconds in which they become cells.

        To be told by who knows the cache.
        """
        raise NotImplementedError

    def _pass(self, n_steps: int) -> None:
        """So many steps of the phase are over."""
        if not n_steps:
            return
        gap = self._step + self._stop
        self._stop = 0.0
        for text in self._texts:
            if text is self._reader:
                text.n_read += n_steps * self._chunk
            elif text.n_said:
                text.n_said += n_steps
                if gap > text.gap:
                    text.gap = gap
        self._begin += n_steps * self._step
        self.seconds_busy += n_steps * self._step
        self._n_steps -= n_steps

    def _plan(self) -> None:
        """The next phase."""
        while self._waiting and len(self._texts) < self._n_slots:
            text = self._waiting.popleft()
            n_cached, seconds = self.cached(text)
            # the last token is decoded in any case, since its logits are wanted
            text.n_read = min(n_cached, text.n_prompt - 1)
            text.n_cached += text.n_read
            self._begin += seconds
            self._stop += seconds
            self.seconds_busy += seconds
            self._texts.append(text)
        if not self._texts:
            self._n_steps, self._reader = 0, None
            return
        n_steps, left, n_talking, n_cells = 1 << 30, 1 << 30, 0, 0
        reader: SimulatedText | None = None
        for text in self._texts:
            if text.n_said:
                n_talking += 1
                n_cells += text.n_read + text.n_said
                n_steps = min(n_steps, text.n_answer - text.n_said)
            elif text.n_prompt - text.n_read < left:
                reader, left = text, text.n_prompt - text.n_read
        chunk = 0
        if reader:
            chunk = min(CHUNK, left)
            n_steps = min(n_steps, left // chunk)
        half = n_steps // 2
        n_cells += n_talking * (half + 1)
        if reader:
            n_cells += cells_of_run(reader.n_read + half * chunk, chunk)
        self._reader, self._chunk, self._n_steps = reader, chunk, n_steps
        self._step = self._times.seconds(n_talking + chunk, n_cells)

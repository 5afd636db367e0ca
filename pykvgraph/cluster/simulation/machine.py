"""A simulated worker: an engine of which only the seconds of its steps are left."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from pykvgraph.cluster.simulation.traffic import Asked
from pykvgraph.plan.time_model import TimeModel, cells_of_run

CHUNK = 64  # tokens of a prompt that a step decodes beside the texts that talk, as an engine does


@dataclass(eq=False)
class Text:
    """A request on its way.

    n_cached: tokens of its prompt that were in the cache when it entered. n_read: those that need no decoding
    any more. n_said: tokens of the answer. came, first: seconds of the clock, when it was asked and when its
    first token came.
    """

    asked: Asked
    came: float
    n_cached: int = 0
    n_read: int = 0
    n_said: int = 0
    first: float = 0.0

    @property
    def n_cells(self) -> int:
        """Of the text so far."""
        return self.n_read + self.n_said


class Machine:
    """Texts in slots, all in step; of those whose prompts are read, the one with least left is read first.

    Steps that are alike are one phase, of which the seconds come from the middle one. A text that comes
    waits for the end of the step. n_cached(text): tokens of a prompt that are in the cache when it enters.
    """

    def __init__(self, times: TimeModel, n_slots: int) -> None:
        self.seconds_busy = 0.0
        self._times = times
        self._n_slots = n_slots
        self._texts: list[Text] = []
        self._waiting: deque[Text] = deque()
        self._reader: Text | None = None
        self._chunk = 0  # tokens of its prompt in each step
        self._begin = 0.0  # of the phase
        self._step = 0.0  # seconds
        self._n_steps = 0  # of the phase; 0: there is none

    def enter(self, text: Text, now: float) -> None:
        """It comes. Ask end() anew."""
        self._waiting.append(text)
        if not self._n_steps:
            self._begin = now
            self._plan()
            return
        n_done = min(max(math.ceil((now - self._begin) / self._step), 0), self._n_steps)
        if len(self._texts) < self._n_slots and n_done < self._n_steps:
            self._pass(n_done)
            self._plan()

    def end(self) -> float:
        """When the phase ends; infinity: nobody is answered."""
        return self._begin + self._n_steps * self._step if self._n_steps else math.inf

    def step(self) -> tuple[list[Text], list[Text]]:
        """The phase has ended: those whose prompts are read now, and those that are answered."""
        self._pass(self._n_steps)
        read = [text for text in self._texts if text is self._reader and text.n_read == text.asked.n_prompt]
        for text in read:
            text.first = self._begin
            text.n_said = 1
        answered = [text for text in self._texts if text.n_said >= text.asked.n_answer]
        self._texts = [text for text in self._texts if text.n_said < text.asked.n_answer]
        self._plan()
        return read, answered

    def n_cached(self, text: Text) -> int:
        """To be told by who knows the cache."""
        raise NotImplementedError

    def _pass(self, n_steps: int) -> None:
        """So many steps of the phase are over."""
        for text in self._texts:
            if text is self._reader:
                text.n_read += n_steps * self._chunk
            elif text.n_said:
                text.n_said += n_steps
        self._begin += n_steps * self._step
        self.seconds_busy += n_steps * self._step
        self._n_steps -= n_steps

    def _plan(self) -> None:
        """The next phase."""
        while self._waiting and len(self._texts) < self._n_slots:
            text = self._waiting.popleft()
            # the last token is decoded in any case, since its logits are wanted
            text.n_cached = text.n_read = min(self.n_cached(text), text.asked.n_prompt - 1)
            self._texts.append(text)
        talking = [text for text in self._texts if text.n_said]
        reading = [text for text in self._texts if not text.n_said]
        self._reader = min(reading, key=lambda text: text.asked.n_prompt - text.n_read, default=None)
        self._n_steps = min((text.asked.n_answer - text.n_said for text in talking), default=1 << 30)
        self._chunk = 0
        if self._reader:
            left = self._reader.asked.n_prompt - self._reader.n_read
            self._chunk = min(CHUNK, left)
            self._n_steps = min(self._n_steps, left // self._chunk)
        if not self._texts:
            self._n_steps = 0
            return
        half = self._n_steps // 2
        n_cells = sum(text.n_cells + half + 1 for text in talking)
        if self._reader:
            n_cells += cells_of_run(self._reader.n_read + half * self._chunk, self._chunk)
        self._step = self._times.seconds(len(talking) + self._chunk, n_cells)

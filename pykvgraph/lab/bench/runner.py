"""Runs tests on engines by turns, and puts the results side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pykvgraph.lab.bench.engines import Engine, LibllamaEngine, OurEngine
from pykvgraph.lab.bench.tests import Test
from pykvgraph.lab.libllama import LibllamaModel
from pykvgraph.model import Model
from pykvgraph.params import ContextParams

Maker = Callable[[], Engine]


@dataclass(frozen=True)
class Result:
    """A test on an engine: seconds of each repetition, warm-up left out."""

    test: Test
    engine: str
    seconds: tuple[float, ...]

    @property
    def rates(self) -> list[float]:
        if self.test.unit == "us/t":
            return [seconds * 1e6 / self.test.amount for seconds in self.seconds]
        return [self.test.amount / seconds for seconds in self.seconds]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def makers(params: ContextParams, model: Model, other: LibllamaModel | None, test: Test) -> list[Maker]:
    """Ours first; libllama with either attention, flash (its default) first; streams where they matter."""
    engines: list[Maker] = [lambda: OurEngine(params, model)]
    if other is not None and test.has_other:
        for unified in (True, False) if test.n_seq > 1 else (True,):
            # libllama has no other attention than flash for a quantized V
            for flash in (True,) if params.type_v.startswith("q") else (True, False):
                engines.append(
                    lambda flash=flash, unified=unified: LibllamaEngine(  # type: ignore[misc]
                        params, other, flash=flash, unified=unified
                    )
                )
    return engines


def measure(
    test: Test, engines: Sequence[Maker], n_repetitions: int, tick: Callable[[], None] = lambda: None
) -> list[Result]:
    """Each repetition runs every engine once, so that what the machine does meanwhile meets all of them."""
    with ExitStack() as stack:
        opened = []
        for maker in engines:
            opened.append(maker())
            stack.callback(opened[-1].close)
        seconds: list[list[float]] = [[] for _ in opened]
        for repetition in range(n_repetitions + 1):
            for i in range(len(opened)):
                which = (i + repetition) % len(opened)  # nobody always comes first
                opened[which].clear()
                spent = test.run(opened[which])
                if repetition > 0:
                    seconds[which].append(spent)
                tick()
    return [Result(test, engine.name, tuple(spent)) for engine, spent in zip(opened, seconds, strict=True)]

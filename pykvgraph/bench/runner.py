"""Runs tests on several engines, which alternate, and collects the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pykvgraph.bench.engines import LibllamaEngine, MeasuredEngine, OurEngine
from pykvgraph.bench.libllama import LibllamaModel
from pykvgraph.bench.tests import Test
from pykvgraph.model.adapter import Adapter
from pykvgraph.model.model import Model
from pykvgraph.params.params import ContextParams

Maker = Callable[[], MeasuredEngine]


@dataclass(frozen=True)
class Result:
    """The result of a test on an engine: the seconds of each repetition, without the warm-up."""

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


def makers(
    params: ContextParams,
    model: Model,
    other: LibllamaModel | None,
    test: Test,
    adapters: Sequence[tuple[Adapter, float]] = (),
) -> list[Maker]:
    """Our engine first, then libllama: with flash attention (its default) and without.

    For tests with several sequences libllama runs with a shared cache and with a cache per sequence.
    """
    engines: list[Maker] = [lambda: OurEngine(params, model, adapters)]
    if other is not None and test.has_other:
        for unified in (True, False) if test.n_seq > 1 else (True,):
            # for a quantized V libllama has flash attention only
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
    """Runs every engine once in each repetition, so that other load on the machine affects all of them."""
    with ExitStack() as stack:
        opened = []
        for maker in engines:
            opened.append(maker())
            stack.callback(opened[-1].close)
        seconds: list[list[float]] = [[] for _ in opened]
        for repetition in range(n_repetitions + 1):
            for i in range(len(opened)):
                which = (i + repetition) % len(opened)  # so that each engine comes first in turn
                opened[which].clear()
                spent = test.run(opened[which])
                if repetition > 0:
                    seconds[which].append(spent)
                tick()
    return [Result(test, engine.name, tuple(spent)) for engine, spent in zip(opened, seconds, strict=True)]

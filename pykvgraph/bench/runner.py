"""Runs tests on several engines, which alternate, and collects the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pykvgraph.bench.engines import LibllamaEngine, MeasuredEngine, OurEngine
from pykvgraph.bench.libllama import LibllamaModel
from pykvgraph.bench.llama_bench import LlamaBench
from pykvgraph.bench.tests import Test
from pykvgraph.model.adapter import Adapter
from pykvgraph.model.model import Model
from pykvgraph.params.params import ContextParams

Maker = Callable[[], MeasuredEngine]


@dataclass(frozen=True)
class Result:
    """The result of a test on an engine: the seconds of each repetition, without the warm-up.

    version: of a program, as it says itself. refused: why a program can't run this test; it has no seconds.
    """

    test: Test
    engine: str
    seconds: tuple[float, ...]
    version: str | None = None
    refused: str | None = None

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


def able_of(programs: Sequence[LlamaBench], test: Test) -> list[LlamaBench]:
    """Those that can run the test."""
    return [program for program in programs if test.kind and not program.refusal(test)]


def measure(
    test: Test,
    engines: Sequence[Maker],
    n_repetitions: int,
    tick: Callable[[], None] = lambda: None,
    programs: Sequence[LlamaBench] = (),
) -> list[Result]:
    """Runs every engine once in each repetition, so that other load on the machine affects all of them.

    So it does with the programs, where llama-bench has such a test. Those that refuse it come last.
    """
    able = able_of(programs, test)
    with ExitStack() as stack:
        opened = []
        for maker in engines:
            opened.append(maker())
            stack.callback(opened[-1].close)
        turns: list[Callable[[], float]] = [partial(_run_on, engine, test) for engine in opened]
        turns += [partial(program.seconds, test) for program in able]
        seconds: list[list[float]] = [[] for _ in turns]
        for repetition in range(n_repetitions + 1):
            for i in range(len(turns)):
                which = (i + repetition) % len(turns)  # so that each one comes first in turn
                spent = turns[which]()
                if repetition > 0:
                    seconds[which].append(spent)
                tick()
    names = [(engine.name, None) for engine in opened] + [(each.name, each.version) for each in able]
    results = [
        Result(test, name, tuple(spent), version)
        for (name, version), spent in zip(names, seconds, strict=True)
    ]
    refusing = [program for program in programs if test.kind and program not in able]
    return results + [Result(test, each.name, (), each.version, each.refusal(test)) for each in refusing]


def _run_on(engine: MeasuredEngine, test: Test) -> float:
    engine.clear()
    return test.run(engine)

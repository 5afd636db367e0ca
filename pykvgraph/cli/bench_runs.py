"""What `pykvgraph bench` measures, with its progress on a terminal."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import ContextParams

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

    from pykvgraph.bench.requests import Served
    from pykvgraph.bench.runner import Result
    from pykvgraph.bench.tests import Test
    from pykvgraph.bench.tiers import TierSpeed
    from pykvgraph.bench.turns import MeasuredTurn, Speaker
    from pykvgraph.cli.rival import Rivals
    from pykvgraph.context.trace import Span
    from pykvgraph.model.model import Model

SHARED = "shared"


def progress(label: str, length: int) -> ProgressBar[int]:
    """How much of a measurement is done, on a terminal."""
    return click.progressbar(length=length, label=label, file=sys.stderr, hidden=not sys.stderr.isatty())


def params_of(n_threads: int, sizes: dict[str, Any]) -> ContextParams:
    """Those that all tests of an engine have."""
    return ContextParams(
        n_threads=n_threads,
        n_threads_batch=n_threads,
        # a test calls defrag itself
        **{"defrag_threshold": -1, **{name: value for name, value in sizes.items() if name != "adapters"}},
    )


def run_one(
    model: Model, rivals: Rivals, test: Test, repetitions: int, params: ContextParams, adapters: Any
) -> list[Result]:
    """A test on every engine, and on the programs."""
    from pykvgraph.bench.runner import able_of, makers, measure

    if test.n_seq > params.n_batch:
        raise InvalidArgumentError(
            f"{test.name} decodes {test.n_seq} tokens at once, and -b allows {params.n_batch}"
        )
    # libllama rounds up to this; so both engines have the same room
    params = dataclasses.replace(params, n_ctx=-(-test.n_cells // 256) * 256, n_seq_max=test.n_seq)
    engines = makers(params, model, rivals.libllama, test, adapters)
    n_turns = (len(engines) + len(able_of(rivals.programs, test))) * (repetitions + 1)
    with progress(f"{test.name} at {test.depth}", n_turns) as bar:
        return measure(test, engines, repetitions, lambda: bar.update(1), rivals.programs)


def run_turns(
    model: Model, depth: int, repetitions: int, n_threads: int, sizes: dict[str, Any]
) -> dict[str, list[MeasuredTurn]]:
    """The conversation through a TokenSequence and an Engine, new ones each time, by turns; no warm-up."""
    from pykvgraph.bench.turns import EngineSpeaker, TextSpeaker, converse, medians, n_asked, write_script
    from pykvgraph.context.context import Context
    from pykvgraph.engine import Engine
    from pykvgraph.sequence.sequence import checkpoint_cells

    script = write_script(model, depth)
    sizes = {
        "n_ctx": -(-script.n_cells // 256) * 256,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        **sizes,
    }
    runs: dict[str, list[list[MeasuredTurn]]] = {"TokenSequence": [], "Engine": []}
    with progress(f"turns after {depth}", 2 * repetitions * n_asked(script)) as bar:

        def run(through: str, speaker: Speaker) -> None:
            runs[through].append([])
            for turn in converse(speaker, script):
                runs[through][-1].append(turn)
                bar.update(1)

        for _ in range(repetitions):
            with Context(model, **{"checkpoint_cells": checkpoint_cells(model), **sizes}) as ctx:
                run("TokenSequence", TextSpeaker(ctx))
            with Engine(model, n_seq_max=1, **sizes) as engine:
                run("Engine", EngineSpeaker(engine))
    return {through: medians(each) for through, each in runs.items()}


def run_tiers(
    model: Model, depth: int, repetitions: int, n_threads: int, sizes: dict[str, Any]
) -> tuple[list[TierSpeed], list[Span]]:
    """New contexts each time, by turns."""
    from pykvgraph.bench.tiers import ARGUMENTS, measure_tiers

    sizes = {**sizes, "n_threads": n_threads, "n_threads_batch": n_threads}
    with progress(f"tiers at {depth}", repetitions * len(ARGUMENTS)) as bar:
        return measure_tiers(model, depth, repetitions, sizes, lambda: bar.update(1))


def run_requests(
    model: Model, depth: int, repetitions: int, n_threads: int, sizes: dict[str, Any]
) -> dict[str, list[Served]]:
    """Requests that begin with the same tokens, so many: to engines that share them, or not, by turns.

    Each time to a new engine.
    """
    from pykvgraph.bench.requests import N_AT_A_TIME, n_cells, serve, write_prompts
    from pykvgraph.engine import Engine

    prompts = write_prompts(model, depth, (depth // 8, depth))
    runs: dict[str, list[Served]] = {SHARED: [], "not shared": []}
    with progress(f"prefix of {depth}", repetitions * len(runs)) as bar:
        for _ in range(repetitions):
            for how, done in runs.items():
                with Engine(
                    model,
                    n_ctx=n_cells(prompts),
                    n_seq_max=N_AT_A_TIME,
                    n_threads=n_threads,
                    n_threads_batch=n_threads,
                    prefix_cache=how == SHARED,
                    **sizes,
                ) as engine:
                    done.append(serve(engine, prompts))
                bar.update(1)
    return runs

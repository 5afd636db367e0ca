"""An engine that many wait for: what a step does for each of them doesn't grow with their number."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.kinds import KINDS
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.engine.commands import CellCommand

TALK = kvg.SamplingParams(max_tokens=50)


def work_of(do: Callable[[], object]) -> int:
    """Lines of Python that it runs; each round of a comprehension is one."""
    n = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal n
        n += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return n


def engine_of(model: kvg.Model) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=256, n_seq_max=2, background=False, **F32)


@pytest.mark.parametrize("way", ["cancel", "park and resume"])
def test_a_step_for_ten_times_as_many(small: kvg.Model, way: str) -> None:
    """They come, some are cancelled or parked, and the others are cancelled."""

    def work(n: int) -> int:
        with engine_of(small) as engine:
            requests = [engine.submit([i % 50 + 5], TALK) for i in range(n)]
            n_lines = work_of(engine.step)
            assert engine.stats().n_waiting == n - 2
            if way == "cancel":
                for each in requests[n // 2 :]:
                    each.cancel()
            else:
                n_lines += work_of(lambda: [engine.park(each) for each in requests[n - 20 :]])
                assert engine.stats().n_parked == 20
                n_lines += work_of(lambda: [engine.resume(each) for each in requests[n - 20 :]])
                for each in requests:
                    each.cancel()
            n_lines += work_of(engine.step)
            for each in requests:
                each.cancel()
            n_lines += work_of(engine.step)
            assert engine.stats().n_waiting == engine.stats().n_running == 0
            assert all(each.done for each in requests)
        return n_lines

    few, many = work(100), work(1000)
    assert many <= 11 * few


@pytest.mark.parametrize("spec", KINDS, ids=str)
def test_who_comes_last_is_compared_with_few(
    spec: ArchSpec, architecture: Callable[[ArchSpec], Path]
) -> None:
    """A step in which 3,000 more come, where places to part are looked for, too."""
    with kvg.Model(architecture(spec), device=where.device) as model, engine_of(model) as engine:

        def step_with(n: int) -> int:
            for i in range(n):
                engine.submit([i % 50 + 5], TALK)
            return work_of(engine.step)

        step_with(200)  # the first 64 have been compared with each other
        few, many = step_with(10), step_with(3010)
        assert many - few <= 3000 * 40


def test_commands_of_many_leave_time_for_those_who_talk(small: kvg.Model) -> None:
    with engine_of(small) as engine:
        decodes = engine.submit([5, 6], TALK)
        engine.step()
        commands = [CellCommand(lambda index, seq: time.sleep(0.03)) for _ in range(5)]
        for each in commands:
            engine._loop.give(each)
        for n_done in range(1, 6):
            engine.step()
            assert sum(each.done.done() for each in commands) == n_done
        assert engine.stats().decoded_tokens == 2 + 5
        decodes.cancel()
        quick = [CellCommand(lambda index, seq: None) for _ in range(50)]
        for each in quick:
            engine._loop.give(each)
        engine.step()
        assert all(each.done.done() for each in quick)

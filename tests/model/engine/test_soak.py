"""Random requests, cancels and faults: accounts are exact at every step, and every request ends.

Faults need a library that was built with KVGRAPH_TEST_HOOKS, as for `make test`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import chance, where
from support.architectures import ArchSpec
from support.kinds import KINDS, SINKS
from support.recurrent import DELTA_NET
from support.soak import N_CTX, Soak, has_faults, soak_of_few_cells

import pykvgraph as kvg
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation import gate
from pykvgraph.prefix.node import Node, Point

SPECS = [*KINDS, SINKS]
BY_THE_THOUSAND = pytest.mark.skipif(not chance.THOROUGH, reason="`make thorough` takes that many steps")
LONG = pytest.param(1000, marks=[pytest.mark.slow, BY_THE_THOUSAND])


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


def n_left() -> int:
    gc.collect()
    kinds = (RequestSequence, Node, Point, kvg.Request, kvg.Hold)
    return sum(isinstance(each, kinds) for each in gc.get_objects())


@pytest.mark.parametrize("draft", ["ngram", "model"])
@pytest.mark.parametrize("n_steps", [80, LONG])
def test_drafts_lose_nothing(model: kvg.Model, n_steps: int, draft: str) -> None:
    """N-grams, or the model as its own draft, which one with states can't be."""
    if draft == "model" and model.arch == DELTA_NET.arch:
        pytest.skip("a draft model has no states")
    soak = Soak(model, n_steps, False, model if draft == "model" else "ngram")
    soak.vary_drafts()
    soak.run(n_steps, faults=has_faults())
    if not has_faults():  # which end requests before they have drafts
        stats = soak.engine.stats()
        assert soak.n_failed == 0
        assert stats.drafted > 0
        assert draft == "ngram" or 0 < stats.accepted < stats.drafted
    soak.close()


@pytest.mark.parametrize("overcommit", [False, True])
@pytest.mark.parametrize("n_steps", [40, LONG])
def test_nothing_is_lost_or_left(model: kvg.Model, n_steps: int, overcommit: bool) -> None:
    before, n_threads = n_left(), threading.active_count()
    soak = Soak(model, n_steps + overcommit, overcommit)
    soak.run(n_steps, faults=has_faults())
    assert overcommit or soak.engine.stats().n_preempted == 0
    assert has_faults() or soak.n_failed == 0
    assert soak.n_forgotten > 0 or n_steps < 1000 or not soak.engine.can_shift
    soak.close()
    del soak
    assert n_left() == before
    assert threading.active_count() == n_threads


@pytest.mark.parametrize("n_steps", [60, LONG])
def test_nobody_lacks_a_cell_with_drafts_that_hold(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch, n_steps: int
) -> None:
    """The model makes its own drafts, where it can: a greedy text is as far ahead of others as can be."""
    monkeypatch.setattr(gate.Gate, "lengths", lambda self, asked, each=0.0: [most for _, most in asked])
    has_states = any(layer.kind != "attention" for layer in model.layers)
    soak = Soak(model, n_steps, False, "ngram" if has_states else model)
    alone = soak.engine.submit(soak.shared[0], kvg.SamplingParams(max_tokens=40, temperature=0)).result()
    assert has_states or alone.n_said < 8 or alone.accepted >= alone.n_said // 2  # it may end at once
    soak.run(n_steps, faults=False)
    stats = soak.engine.stats()
    assert stats.n_preempted == soak.n_failed == 0
    soak.close()


@pytest.mark.skipif(where.device != "cpu", reason="it is about the memory of the host")
@pytest.mark.parametrize("n_steps", [60, LONG])
def test_nobody_lacks_a_cell_of_as_many_as_fit(model: kvg.Model, n_steps: int) -> None:
    """n_ctx="auto", where the memory has room for few cells, with drafts of any length."""
    soak = soak_of_few_cells(model, n_steps, "ngram")
    assert N_CTX <= soak.engine.context.n_ctx < 4 * model.n_ctx_train
    soak.vary_drafts()
    soak.run(n_steps, faults=False)
    stats = soak.engine.stats()
    assert stats.drafted > 0
    assert stats.n_preempted == soak.n_failed == 0
    soak.close()

"""The embedded model: it finds its keys, and no longer does when the cache is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engines import run_of
from support.faults import fault
from support.judge import judge

import pykvgraph as kvg
from pykvgraph.demos.passkey import Task, Trial, default_n_ctx, document_of, run
from pykvgraph.models import embedded_model

SEEDS = range(11, 21)


@pytest.fixture(scope="module")
def model() -> Iterator[kvg.Model]:
    with kvg.Model(embedded_model(), device="cpu") as loaded:
        yield loaded


def trials(model: kvg.Model, tasks: list[Task], n_batch: int = 512) -> list[Trial]:
    n_ctx = default_n_ctx(model, tasks[0].n_grp, tasks[0].n_keep)
    with kvg.Context(model, n_ctx=n_ctx, n_batch=n_batch) as ctx:
        return [run(ctx, task) for task in tasks]


def test_it_is_small_and_reads_any_text(model: kvg.Model) -> None:
    assert embedded_model().stat().st_size <= 8e6
    assert (model.arch, model.n_ctx_train) == ("llama", 4096)
    for text in ("The grass is green.", "w\u00f6rld \u65e5\n\t\U0001f389", "50000"):
        assert model.tokenizer.decode(model.tokenizer.encode(text)).strip() == text
    digits = [model.tokenizer.encode(f"is {digit}", add_special=False)[-1] for digit in range(10)]
    assert [model.tokenizer.decode([token]) for token in digits] == list("0123456789")


def test_logits_are_those_of_libllama(model: kvg.Model) -> None:
    ids, _ = document_of(model, Task(n_junk=12, i_pos=5))
    judge(embedded_model(), lambda engine: engine.decode(run_of(ids)))


@pytest.mark.slow
def test_ten_keys_whose_cells_are_shifted_and_moved(model: kvg.Model) -> None:
    results = trials(model, [Task(n_junk=250, i_pos=190, seed=seed) for seed in SEEDS])
    assert sum(trial.found for trial in results) >= 9
    for trial in results:
        assert min(trial.discards, trial.shifted_cells, trial.moved_cells, trial.key_cells_moved) > 0


@pytest.mark.slow
def test_a_key_at_half_its_position(model: kvg.Model) -> None:
    results = trials(model, [Task(n_junk=250, i_pos=90, n_grp=2, seed=seed) for seed in SEEDS[:3]])
    assert all(trial.found for trial in results)


def test_a_key_that_was_given_up_is_not_found(model: kvg.Model) -> None:
    (trial,) = trials(model, [Task(n_junk=250, i_pos=10, seed=SEEDS[0])])
    assert (trial.in_window, trial.found) == (False, False)


@pytest.mark.slow
@pytest.mark.parametrize("site", ["shift-skip", "shift-sign"])
def test_a_wrong_rotation_costs_the_key(model: kvg.Model, site: str) -> None:
    """As in benchmarks/passkey_bars.py: read at the window's end, then moved by half a window."""
    tasks = [Task(n_junk=205, i_pos=195, seed=seed) for seed in SEEDS[:3]]
    assert all(trial.found for trial in trials(model, tasks, n_batch=2048))
    with fault(site):
        assert sum(trial.found for trial in trials(model, tasks, n_batch=2048)) <= 1

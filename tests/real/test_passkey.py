"""The passkey test on SmolLM2: keys that are in the cache are found, and far ones with self-extend."""

from __future__ import annotations

import pytest
from support.chance import THOROUGH
from support.engines import open_context

import pykvgraph as kvg
from pykvgraph.demos.passkey import Task, run

pytestmark = pytest.mark.slow
N_KEEP = 32
N_CTX = 1024 + N_KEEP
THOROUGHLY = pytest.mark.skipif(not THOROUGH, reason="minutes: KVGRAPH_THOROUGH=1 runs it")


@pytest.mark.parametrize(
    ("i_pos", "is_there"),
    [(45, True), (30, True), (3, False)],
)
def test_a_key_is_found_while_it_is_in_the_cache(smollm2: kvg.Model, i_pos: int, is_there: bool) -> None:
    with open_context(smollm2, n_ctx=N_CTX, n_batch=256) as ctx:
        trial = run(ctx, Task(n_junk=60, i_pos=i_pos, n_keep=N_KEEP, seed=i_pos))
    assert trial.n_tokens > 1.3 * N_CTX and trial.discards >= 2
    assert (trial.in_window, trial.found) == (is_there, is_there), trial


@THOROUGHLY
def test_keys_at_drawn_places(smollm2: kvg.Model) -> None:
    """6,000 tokens through 4,128 cells, as `pykvgraph passkey` does."""
    with open_context(smollm2, n_ctx=4096 + N_KEEP, n_batch=512) as ctx:
        trials = [run(ctx, Task(seed=seed)) for seed in range(1, 7)]
    assert [trial.found for trial in trials] == [trial.in_window for trial in trials]


@THOROUGHLY
def test_self_extend_finds_what_is_beyond_the_trained_context(smollm2: kvg.Model) -> None:
    """8,192 positions were trained; the key is further than that from the question."""
    with open_context(smollm2, n_ctx=17_408, n_batch=512) as ctx:
        trial = run(ctx, Task(n_junk=700, i_pos=250, n_grp=2))
    assert trial.n_tokens > 16_800 and trial.discards == 0
    assert trial.found, trial

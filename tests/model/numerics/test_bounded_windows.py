"""Models with windows whose cells are reused, past the window, and their shifts: libllama is the judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import Engine, Logits, open_context, prompt_then_singles, random_ids, run_of
from support.judge import judge
from support.models import N_VOCAB

import pykvgraph as kvg

IDS = random_ids(200, N_VOCAB, seed=3)
SPECS = [
    ArchSpec("gemma2", window=24),
    ArchSpec("gemma3", n_layer=6, window=24, period=3),
    ArchSpec("gpt-oss", window=24, n_expert=8),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_logits_past_the_window(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    """A prompt of 80 tokens, then 120 one by one, with 24 + 80 cells in the window's group."""
    path = architecture(spec)
    judge(path, lambda engine: prompt_then_singles(engine, IDS, 80), n_ctx=256, n_batch=80)
    with kvg.Model(path, device="cpu") as model, open_context(model, n_ctx=256, n_batch=80) as ctx:
        assert [group.n_cells for group in ctx.kv.groups] == [256, 24 + 80]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shifts_with_every_position(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    """With swa_full, which libllama too wants for a shift: what is moved into a window is seen again."""

    def shifted(engine: Engine) -> Logits:
        rows = [prompt_then_singles(engine, IDS[:120], 80)]
        engine.seq_rm(0, 20, 70)
        engine.seq_add(0, 70, -1, -50)
        rows.append(engine.decode(run_of(IDS[120:150], 70)))
        engine.seq_rm(0, 60, 95)
        engine.seq_add(0, 95, -1, -35)
        rows.append(engine.decode(run_of(IDS[150:160], 65)))
        return np.concatenate(rows)

    judge(architecture(spec), shifted, n_ctx=256, swa_full=True)

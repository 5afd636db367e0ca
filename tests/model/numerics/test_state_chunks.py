"""Prompts of recurrent layers, whose tokens go through a state together, however they are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import batch_of, decode, open_context, random_ids, run_of
from support.models import N_VOCAB, WeightType
from support.recurrent import same

import pykvgraph as kvg

IDS = random_ids(150, N_VOCAB)
OPTIONS: dict[str, Any] = {"n_ctx": 160, "n_batch": 150, "type_k": "f32", "type_v": "f32"}
SPECS = [
    ArchSpec("qwen35", n_layer=4, period=4, state_heads=4, state_dim=64),
    ArchSpec("qwen3next", n_layer=2, state_heads=4, state_dim=32, n_expert=2, n_ff_shared=96),
    ArchSpec("kimi-linear", 3, n_head_kv=1, state_heads=4, state_dim=32, n_expert=2, n_ff_shared=96, rank=48),
    ArchSpec("mamba2", n_layer=2, state_heads=8, state_dim=32),
    ArchSpec("falcon-h1", n_layer=2, state_heads=8),
]
Architecture = Callable[[ArchSpec], Path]


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(architecture: Architecture, request: pytest.FixtureRequest) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


def test_a_prompt_gives_the_same_however_it_is_cut(model: kvg.Model) -> None:
    rows = {}
    for n_ubatch in (1, 7, 45, 150):
        with open_context(model, **OPTIONS, n_ubatch=n_ubatch) as ctx:
            rows[n_ubatch] = decode(ctx, run_of(IDS))
    assert all(same(each, rows[1]) for each in rows.values())


def test_states_are_kept_in_the_middle_of_a_prompt(model: kvg.Model) -> None:
    with open_context(model, **OPTIONS) as ctx:
        batch = kvg.Batch()
        batch.extend(IDS, 0, (0,), logits="all", checkpoints=(50, 140))
        ctx.decode(batch)
        whole = ctx.logits()
        for pos in (140, 50):
            ctx.kv.seq_rm(0, pos, -1)
            assert same(decode(ctx, run_of(IDS[pos:], pos)), whole[pos:])


@pytest.mark.parametrize("weights", [WeightType.F32, WeightType.Q8_0], ids=lambda each: each.name)
def test_threads_make_no_difference(architecture: Architecture, weights: WeightType) -> None:
    """With weights in F32 ggml's threads share the work, with Q8_0 our own where the CPU has AVX-512 VNNI."""
    spec = ArchSpec("qwen35", n_layer=4, period=4, state_heads=8, state_dim=64, weights=weights)
    rows = []
    with kvg.Model(architecture(spec), device="cpu") as model:
        for n_threads in (1, 2, 3, 8):
            with kvg.Context(model, **OPTIONS, n_threads=n_threads, n_threads_batch=n_threads) as ctx:
                ctx.decode(batch_of(run_of(IDS)))
                rows.append(ctx.logits())
    assert all(np.array_equal(each, rows[0]) for each in rows)

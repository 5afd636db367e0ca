"""ALiBi at distances and positions that F16 and F32 can't tell: ggml's attention has distances in F16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import Logits, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB

import pykvgraph as kvg

IDS = random_ids(60, N_VOCAB)


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    """Its last head loses next to nothing over 100,000 positions."""
    path = architecture(ArchSpec("mpt", head_dim=16, fused=True))
    overrides = {"mpt.attention.max_alibi_bias": 40.0}
    with kvg.Model(path, device=where.device, kv_overrides=overrides) as model:
        yield model


def behind_a_gap(model: kvg.Model, gap: int, flash_attn: str, pos0: int = 0) -> Logits:
    with open_context(model, n_ctx=256, flash_attn=flash_attn) as ctx:
        decode(ctx, run_of(IDS[:40], pos0))
        return decode(ctx, run_of(IDS[40:], pos0 + 40 + gap))


@pytest.mark.any_device
@pytest.mark.parametrize("gap", [0, 3000, 65_400, 100_000])
def test_what_is_far_away_is_seen(model: kvg.Model, gap: int) -> None:
    with kvg.Model(model.path, device="cpu", kv_overrides=model.kv_overrides) as there:
        exact = behind_a_gap(there, gap, "auto")
    for flash_attn in ("auto", "on", "off"):
        assert nmse(behind_a_gap(model, gap, flash_attn), exact) <= where.limit(1e-5)


@pytest.mark.any_device
@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
def test_distances_are_the_same_everywhere(model: kvg.Model, flash_attn: str) -> None:
    first = behind_a_gap(model, 5, flash_attn)
    for pos0 in (100_000, 2**25 + 1, 2**31 - 70):
        assert np.array_equal(behind_a_gap(model, 5, flash_attn, pos0), first)

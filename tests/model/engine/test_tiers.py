"""Prefixes that leave the cells and come back: from memory, from the disk, in another engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.recurrent import DELTA_NET
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.engine import fetches

SPECS = [
    ArchSpec("llama", 2, 32, 2, 1, 16, 32),
    ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8),
    DELTA_NET,
]
TALK = kvg.SamplingParams(max_tokens=12)


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.fixture(autouse=True)
def decoding_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that loading pays, whatever the model's size."""
    monkeypatch.setattr(fetches, "decode_seconds", lambda ctx: lambda first, end: 60.0)


def ids_of(model: kvg.Model, n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.n_vocab) for _ in range(n)]


def engine_of(model: kvg.Model, tiers: kvg.Tiers, n_ctx: int = 256, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=n_ctx, n_seq_max=2, tiers=tiers, **F32, **options)


def push_out(engine: kvg.Engine, seed: int) -> None:
    """Texts that take all cells."""
    for each in range(3):
        engine.submit(ids_of(engine.model, 200, 1000 * seed + each), TALK).result()


@pytest.mark.parametrize("background", [True, False])
def test_a_text_comes_back_from_memory(model: kvg.Model, background: bool) -> None:
    prompt = ids_of(model, 150, 1)
    with engine_of(model, kvg.Tiers("64M"), background=background) as engine:
        first = engine.submit(prompt, TALK).result()
        push_out(engine, 1)
        text = [*prompt, *first.tokens]
        again = engine.submit(text, TALK).result()
        stats = engine.stats()
        assert stats.tiers is not None
        assert again.n_cached == len(text) - 1, stats.tiers
        assert stats.tiers.loaded_tokens >= 100
        assert not any(stats.tiers.misses.values())
    assert are_likeliest(model, prompt, first.tokens)
    assert are_likeliest(model, text, again.tokens)


def test_a_text_comes_back_in_another_engine(model: kvg.Model, tmp_path: Path) -> None:
    prompt, tiers = ids_of(model, 150, 2), kvg.Tiers("64M", "64M", tmp_path)
    with engine_of(model, tiers) as engine:
        first = engine.submit(prompt, TALK).result()
    text = [*prompt, *first.tokens, *ids_of(model, 20, 3)]
    with engine_of(model, tiers) as engine:
        again = engine.submit(text, TALK).result()
        assert again.n_cached == len(prompt) + 11, engine.stats().tiers
        assert engine.submit(text, TALK, salt="other").result().n_cached == 0
    assert are_likeliest(model, text, again.tokens)

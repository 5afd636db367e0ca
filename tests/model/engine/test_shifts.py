"""Texts that are longer than their windows: as one alone shifts, whoever else runs, and whoever shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import chance, where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.recurrent import DELTA_NET
from support.shifted import follows_alone, oldest
from support.soak import F32, are_likeliest

import pykvgraph as kvg

LLAMA = ArchSpec("llama", 2, 32, 2, 1, 16, 32)
ALIBI = ArchSpec("mpt", 2, 32, 2, 2, 16, 32)
GEMMA = ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8)


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(LLAMA), device=where.device) as model:
        yield model


@pytest.mark.parametrize(("n_keep", "n_discard"), [(0, 0), (5, 0), (40, 3), (1000, 0), (1, 1000)])
def test_it_says_what_one_alone_says(model: kvg.Model, n_keep: int, n_discard: int) -> None:
    prompt = ids_of(model, 50, n_keep)
    window = kvg.Window(96, n_keep, n_discard)
    with kvg.Engine(model, n_ctx=400, n_seq_max=3, **F32) as engine:
        others = [engine.submit(ids_of(model, 30, i), kvg.SamplingParams(max_tokens=120)) for i in range(2)]
        done = engine.submit(prompt, kvg.SamplingParams(max_tokens=200), window=window).result()
        n_kept = min(n_keep, 92)
        n_given = min(n_discard, 94 - n_kept)
        n_shifts = follows_alone(model, prompt, list(done.tokens), 96, oldest(n_kept, n_given))
        assert (done.finish_reason, len(done.tokens)) == ("length", 200)
        assert n_shifts > 0
        assert 249 - done.n_discarded < 96
        for i, other in enumerate(others):
            assert are_likeliest(model, ids_of(model, 30, i), other.result().tokens)


def test_windows_that_keep_every_position(architecture: Callable[[ArchSpec], Path]) -> None:
    with kvg.Model(architecture(GEMMA), device=where.device) as model:
        prompt = ids_of(model, 50, 1)
        with kvg.Engine(model, n_ctx=200, n_seq_max=2, swa_full=True, **F32) as engine:
            done = engine.submit(
                prompt, kvg.SamplingParams(max_tokens=100), window=kvg.Window(96, 4)
            ).result()
        assert follows_alone(model, prompt, list(done.tokens), 96, oldest(4, 0)) > 0


def test_positions_that_no_k_has(architecture: Callable[[ArchSpec], Path]) -> None:
    """ALiBi: nothing is rotated."""
    with kvg.Model(architecture(ALIBI), device=where.device) as model:
        prompt = ids_of(model, 50, 1)
        with kvg.Engine(model, n_ctx=200, n_seq_max=2, **F32) as engine:
            done = engine.submit(
                prompt, kvg.SamplingParams(max_tokens=100), window=kvg.Window(96, 4)
            ).result()
        assert follows_alone(model, prompt, list(done.tokens), 96, oldest(4, 0)) > 0


def test_who_shares_the_prompt_is_not_touched(model: kvg.Model) -> None:
    """Texts with one prompt, some of which shift: the others, and who comes later, find true cells."""
    prompt = ids_of(model, 70, 1)
    window = kvg.Window(96, 4)
    with kvg.Engine(model, n_ctx=500, n_seq_max=4, **F32) as engine:
        shifting = [
            engine.submit(prompt, kvg.SamplingParams(max_tokens=150), window=window) for _ in range(2)
        ]
        plain = [engine.submit(prompt, kvg.SamplingParams(max_tokens=60)) for _ in range(2)]
        for request in shifting:
            assert follows_alone(model, prompt, list(request.result().tokens), 96, oldest(4, 0)) > 1
        for request in plain:
            assert are_likeliest(model, prompt, request.result().tokens)
        later = engine.submit(prompt, kvg.SamplingParams(max_tokens=20)).result()
        assert later.n_cached == 69
        assert are_likeliest(model, prompt, later.tokens)


def test_what_has_moved_is_never_shared(model: kvg.Model) -> None:
    """A prompt that begins as the text that a shift has left behind gets no cells of it."""
    prompt = ids_of(model, 40, 2)
    with kvg.Engine(model, n_ctx=200, n_seq_max=2, **F32) as engine:
        params = kvg.SamplingParams(max_tokens=130)
        done = engine.submit(prompt, params, window=kvg.Window(96, 33)).result()
        n_moved = len(prompt) + len(done.tokens) - done.n_discarded - 33
        left = prompt[:33] + list(done.tokens[-n_moved:])
        again = engine.submit(left, kvg.SamplingParams(max_tokens=10)).result()
        assert again.n_cached <= 34  # and one more by chance
        assert are_likeliest(model, left, again.tokens)


@pytest.mark.parametrize("overcommit", [False, True])
def test_a_small_cache_is_enough(model: kvg.Model, overcommit: bool) -> None:
    """More texts than fit, with shared prompts and windows: all are answered, and nothing leaks."""
    rng = random.Random(chance.seed(7))
    shared = ids_of(model, 60, 3)
    with kvg.Engine(model, n_ctx=200, n_seq_max=4, overcommit=overcommit, background=False, **F32) as engine:
        asked = []
        for i in range(12):
            prompt = shared[: rng.randrange(1, 60)] + ids_of(model, 5, i)
            window = kvg.Window(rng.randrange(70, 150), rng.randrange(20)) if i % 3 else None
            params = kvg.SamplingParams(max_tokens=rng.randrange(1, 120))
            asked.append(engine.submit(prompt, params, window=window))
            engine.step()
        for request in asked:
            assert request.result().finish_reason == "length"
        assert sum(engine.context.kv.seq_count(seq, 0, -1).n_cells for seq in range(4)) == 0
        engine._loop.stepper._index.clear()
        assert engine.context.kv.n_used == 0


def test_who_may_not_shift(model: kvg.Model, architecture: Callable[[ArchSpec], Path]) -> None:
    bad: list[tuple[Any, ...]] = [(7,), (96, -1), (96, 0, -1), ("a",)]
    for arguments in bad:
        with pytest.raises(kvg.InvalidArgumentError):
            kvg.Window(*arguments)
    with kvg.Engine(model, n_ctx=100, n_seq_max=2, **F32) as engine:
        assert engine.can_shift
        with pytest.raises(kvg.CacheFullError, match="120 cells"):
            engine.submit([1], kvg.SamplingParams(max_tokens=200), window=kvg.Window(120))
        with pytest.raises(kvg.CacheFullError, match="window 50"):
            engine.submit(ids_of(model, 50, 0), window=kvg.Window(50))
        with pytest.raises(kvg.InvalidArgumentError, match="one sample"):
            engine.submit([1], kvg.SamplingParams(n=2), window=kvg.Window(50))
        with pytest.raises(kvg.InvalidArgumentError, match="Window"):
            engine.submit([1], window=50)  # type: ignore[arg-type]
    for spec in (GEMMA, DELTA_NET):
        with (
            kvg.Model(architecture(spec), device=where.device) as other,
            kvg.Engine(other, n_ctx=100, n_seq_max=2, **F32) as engine,
        ):
            assert not engine.can_shift
            with pytest.raises(kvg.UnsupportedError, match="window"):
                engine.submit([1], window=kvg.Window(50))

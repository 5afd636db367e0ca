"""Who enters a cache that is too small for all: nobody who is inside is set aside for want of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.soak import F32, are_likeliest

import pykvgraph as kvg

LLAMA = ArchSpec("llama", 2, 32, 2, 1, 16, 32)


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(LLAMA), device=where.device) as model:
        yield model


def test_cells_that_two_blocks_have_are_counted_once(model: kvg.Model) -> None:
    """Old texts that part in their first block share cells: these are there for others once only."""
    common = ids_of(model, 20, 0)
    with kvg.Engine(model, n_ctx=128, n_seq_max=2, background=False, **F32) as engine:
        for seed in range(1, 5):
            engine.submit([*common, *ids_of(model, 12, seed)], kvg.SamplingParams(max_tokens=1)).result()
        assert engine.context.kv.n_used == 20 + 4 * 12
        talk = kvg.SamplingParams(max_tokens=60)
        prompts = [ids_of(model, 30, seed) for seed in (8, 9)]
        found = [request.result() for request in [engine.submit(prompt, talk) for prompt in prompts]]
        assert engine.stats().n_preempted == 0
    assert all(are_likeliest(model, p, each.tokens) for p, each in zip(prompts, found, strict=True))


def test_forks_keep_what_they_share_when_the_first_has_ended(model: kvg.Model) -> None:
    """They see a part of a block that nobody needs; the sample that was there first stops at once."""
    common = ids_of(model, 28, 0)
    with kvg.Engine(model, n_ctx=128, n_seq_max=4, background=False, **F32) as engine:
        engine.submit([*common, *ids_of(model, 4, 1)], kvg.SamplingParams(max_tokens=1)).result()
        samples = kvg.SamplingParams(max_tokens=30, n=2, temperature=1.0)
        two = engine.submit([*common, 5], samples)
        engine.step()
        texts = engine._loop.stepper._running_set
        first = texts.scheduler.running[0]
        texts.leave(first)  # as if it had said a stop word
        first.end("stop", 0.0)
        others = [engine.submit(ids_of(model, n, n), kvg.SamplingParams(max_tokens=30)) for n in (20, 21, 22)]
        for request in (*others, two):
            request.results()
        assert engine.stats().n_preempted == 0


def test_a_short_request_runs_beside_a_long_one_that_has_not_grown_yet(model: kvg.Model) -> None:
    """128 cells: the long one ends with 110, and until then others come and go beside it."""
    with kvg.Engine(model, n_ctx=128, n_seq_max=2, background=False, **F32) as engine:
        long = engine.submit(ids_of(model, 11, 1), kvg.SamplingParams(max_tokens=100))
        for _ in range(2):
            engine.step()
        short = engine.submit(ids_of(model, 40, 2), kvg.SamplingParams(max_tokens=10))
        short.result()
        assert not long.done
        assert len(long.result().tokens) == 100
        assert engine.stats().n_preempted == 0


def test_a_text_whose_prefix_can_not_be_shown_enters_when_it_fits_without(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells that it would have shared it needs of its own: it waits for them, and nobody is set aside."""
    prompt = ids_of(model, 65, 1)
    with kvg.Engine(model, n_ctx=160, n_seq_max=2, background=False, **F32) as engine:
        first = engine.submit(prompt, kvg.SamplingParams(max_tokens=40))
        for _ in range(3):
            engine.step()

        def attach(*_: object) -> None:
            raise kvg.DeviceError("broken")

        monkeypatch.setattr(kvg.KVCache, "attach", attach)
        second = engine.submit(prompt, kvg.SamplingParams(max_tokens=40))
        engine.step()
        assert engine.stats().n_running == 1
        assert second.result().tokens == first.result().tokens
        assert second.result().n_cached == 0
        assert engine.stats().n_preempted == 0

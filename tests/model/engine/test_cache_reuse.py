"""cache_reuse: parts of an older text are moved to where a new one has them, and stay where they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import chance

import pykvgraph as kvg

LEAST = 8
GREEDY = kvg.SamplingParams(max_tokens=6)


@pytest.fixture
def model(stories: Path) -> kvg.Model:
    return kvg.Model(stories, "cpu")


def texts(model: kvg.Model, n: int) -> list[int]:
    story = "Once upon a time, there was a girl named Lily. She loved to play outside with her big red ball. "
    story += (
        "One day, the ball fell into the pond, and a green frog came up to say hello. Lily was very sad. "
    )
    return model.tokenizer.encode(story * 4)[:n]


def answer(engine: kvg.Engine, ids: list[int]) -> kvg.Completion:
    return engine.submit(ids, GREEDY).result()


def test_what_was_moved_is_what_the_cache_operations_give(model: kvg.Model) -> None:
    """Beside a context on which the same parts are removed and moved by hand."""
    old = texts(model, 90)
    new = [*old[:20], *old[31:60], *old[70:90], 300, 301, 302]
    with kvg.Engine(model, n_ctx=512, n_seq_max=2, cache_reuse=LEAST, background=False) as engine:
        answer(engine, old)
        told = engine.submit(new, kvg.SamplingParams(max_tokens=1, top_logprobs=512)).result()
        assert told.n_cached == 20 + 29 + 20
        piece = next(iter(engine.submit(new, kvg.SamplingParams(max_tokens=1, top_logprobs=512))))
    with kvg.Context(model, n_ctx=512) as ctx:
        batch = kvg.Batch()
        batch.extend(old, 0)
        ctx.decode(batch)
        ctx.kv.seq_rm(0, 20, 31)
        ctx.kv.seq_add(0, 31, 60, -11)
        ctx.kv.seq_rm(0, 49, 70)
        ctx.kv.seq_add(0, 70, 90, -21)
        batch.clear()
        batch.extend([300, 301, 302], 69)
        rows = ctx.decode_last(batch)
    row = rows.astype(np.float64)
    wanted = row - row.max() - np.log(np.exp(row - row.max()).sum())
    top = dict(piece.top)
    assert len(top) == model.n_vocab
    assert max(abs(top[token] - wanted[token]) for token in range(model.n_vocab)) < 2e-3


def test_the_older_text_stays_as_it_was(model: kvg.Model) -> None:
    old = texts(model, 90)
    with kvg.Engine(model, n_ctx=512, n_seq_max=2, background=False) as engine:
        wanted = answer(engine, old).tokens
    with kvg.Engine(model, n_ctx=512, n_seq_max=2, cache_reuse=LEAST, background=False) as engine:
        assert answer(engine, old).tokens == wanted
        moved = answer(engine, [*old[:20], *old[40:90]])
        assert moved.n_cached == 20 + 49  # the last token is decoded
        again = answer(engine, old)
        assert (again.tokens, again.n_cached) == (wanted, 89)


def test_parts_of_a_text_that_runs(model: kvg.Model) -> None:
    old = texts(model, 90)
    with kvg.Engine(model, n_ctx=512, n_seq_max=4, cache_reuse=LEAST, background=False) as engine:
        first = engine.submit(old, kvg.SamplingParams(max_tokens=40))
        for _ in range(4):
            engine.step()
        second = engine.submit([*old[:20], *old[40:90]], GREEDY)
        assert second.result().n_cached >= 20 + 44  # whole blocks of what runs
        told = first.result().tokens
    with kvg.Engine(model, n_ctx=512, n_seq_max=2, background=False) as engine:
        assert engine.submit(old, kvg.SamplingParams(max_tokens=40)).result().tokens == told


@pytest.mark.parametrize("seed", range(3))
def test_a_small_cache(model: kvg.Model, seed: int) -> None:
    """Texts of parts of one another, with cells for two of them: nobody fails, and no cell is lost."""
    rng = np.random.default_rng(chance.number(seed))
    old = texts(model, 120)
    with kvg.Engine(model, n_ctx=256, n_seq_max=3, cache_reuse=4, background=False) as engine:
        requests, n_moved = [], 0
        for _ in range(60):
            cuts = np.sort(rng.integers(1, 120, 4))
            new = [*old[: cuts[0]], *old[cuts[1] : cuts[2]], *old[cuts[3] :]]
            requests.append(engine.submit(new, kvg.SamplingParams(max_tokens=int(rng.integers(1, 12)))))
            if rng.random() < 0.5:
                engine.step()
            if rng.random() < 0.1:
                requests[int(rng.integers(len(requests)))].cancel()
        for request in requests:
            told = request.result()
            n_moved += told.n_cached
            assert told.finish_reason in ("length", "stop", "cancelled")
        assert engine.stats().n_preempted == 0
        assert not engine.context.kv.cells().seq.any()
        assert n_moved > 1000


def test_what_it_needs(model: kvg.Model) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="prefix_cache"):
        kvg.Engine(model, n_ctx=256, cache_reuse=4, prefix_cache=False)
    with pytest.raises(kvg.InvalidArgumentError, match="cache_reuse"):
        kvg.Engine(model, n_ctx=256, cache_reuse=-1)

"""Prefixes that many begin with, in fewer cells: read in idle time, and for those alone who ask for them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance
from support.architectures import ArchSpec
from support.engines import ids_of, open_context
from support.faults import fault
from support.soak import F32, has_faults
from support.soak_of_prefixes import PrefixSoak

import pykvgraph as kvg
from pykvgraph.context.repetition import Repetition
from pykvgraph.engine.compressed import N_KEPT

N = 544  # whole blocks
EVERY = kvg.SamplingParams(max_tokens=1, top_logprobs=500)
BRIEF = kvg.SamplingParams(max_tokens=3)
PART = 4  # tokens that are read between two looks at whether somebody has come


def engine_of(model: kvg.Model, **options: Any) -> kvg.Engine:
    given = {"n_ctx": 2048, "n_seq_max": 2, "background": False, "prefix_compress": 0.5, **F32, **options}
    return kvg.Engine(model, **given)


def prompts(model: kvg.Model) -> list[list[int]]:
    """They begin alike."""
    return [[*ids_of(model, N, 1), *ids_of(model, 20, 2 + i)] for i in range(5)]


def rest(engine: kvg.Engine) -> int:
    """Until there is nothing to do; how many steps that were."""
    n = 1
    while engine.step():
        n += 1
    return n


def used(engine: kvg.Engine, asked: list[list[int]]) -> list[list[int]]:
    """Three of them are answered: the third finds what the second found. Returns the texts."""
    return [[*prompt, *engine.submit(prompt, BRIEF).result().tokens] for prompt in asked[:3]]


def row_of(piece: kvg.Piece, model: kvg.Model) -> np.ndarray[Any, np.dtype[np.float64]]:
    top = dict(piece.top)
    return np.array([top[token] for token in range(model.n_vocab)])


def by_hand(model: kvg.Model, prompt: list[int], n_cells: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Log probabilities behind a prompt of whose first N tokens so many cells are forgotten."""
    with open_context(model, n_ctx=1400, **F32) as ctx:
        text = kvg.Sequence(ctx)
        text.set(prompt[:N])
        if n_cells:
            assert text.forget(n_cells, "kvzip").n_left == N - n_cells
        row = text.set(prompt).last.logits.astype(np.float64)
    return np.asarray(row - np.logaddexp.reduce(row))


def test_who_asks_gets_the_best_part(small: kvg.Model) -> None:
    """Beside a text that forgets by hand; whoever doesn't ask gets the whole, and finds nothing of it."""
    asked = prompts(small)
    every = kvg.SamplingParams(max_tokens=1, top_logprobs=small.n_vocab)
    with engine_of(small) as engine:
        used(engine, asked)
        rest(engine)
        before = engine.stats().cells_used[0]
        for compressed, n_forgotten in ((True, N // 2), (False, 0), (True, N // 2)):
            request = engine.submit(asked[3], every, compressed=compressed)
            (piece,) = request
            assert row_of(piece, small) == pytest.approx(by_hand(small, asked[3], n_forgotten), abs=1e-4)
            use = request.result().cache
            assert (use.edited > N - 50) == compressed
            assert use.edited + use.cells >= N
        assert engine.find_prefix(asked[3]) > N
        assert engine.stats().cells_used[0] <= before + 20  # no cell of its own


def test_it_has_fewer_cells_when_the_whole_is_gone(small: kvg.Model) -> None:
    asked = prompts(small)
    with engine_of(small) as engine:
        texts = used(engine, asked)
        rest(engine)
        index = engine._loop.stepper._index
        for text in texts:
            index.forget(array("i", text))  # as when others need the cells
        assert engine.stats().cells_used[0] == N // 2
        request = engine.submit(asked[3], BRIEF, compressed=True)
        assert request.result().cache.edited > 0
        assert engine.submit(asked[3], BRIEF).result().n_cached == 0
        # everything that there is is needed by another one: it makes way
        whole = ids_of(small, 2000, 9)
        assert engine.submit(whole, kvg.SamplingParams(max_tokens=40)).result().n_prompt == 2000
        assert engine.submit(asked[3], BRIEF, compressed=True).result().cache.edited == 0


def test_it_is_forgotten_with_the_prefix(small: kvg.Model) -> None:
    """And what is being read, or waits; of another prefix nothing."""
    asked, others = prompts(small), [[*ids_of(small, N, 7), *ids_of(small, 20, 8 + i)] for i in range(3)]
    with engine_of(small) as engine:
        kept = engine._loop.stepper._compressed
        assert kept is not None
        used(engine, others)
        rest(engine)
        assert kept.n_kept == 1
        for n_steps in (0, 3, 1000):  # it waits, is being read, is kept
            texts = used(engine, asked)
            for _ in range(n_steps):
                engine.step()
            assert (kept.has_work, kept.n_kept) == ((False, 2) if n_steps == 1000 else (True, 1))
            for text in texts:
                engine.forget_prefix(text)
            assert (kept.has_work, kept.n_kept) == (False, 1)
        answer = engine.submit(asked[3], BRIEF, compressed=True).result()
        assert (answer.n_cached, answer.cache.edited) == (0, 0)
        assert engine.submit([*others[0], 1], BRIEF, compressed=True).result().cache.edited > 0


def first_token(engine: kvg.Engine, prompt: list[int]) -> int:
    """How many steps it takes."""
    request = engine.submit(prompt, BRIEF)
    n = 0
    while not request._sequences[0]._tokens:
        engine.step()
        n += 1
    request.result()
    return n


@pytest.mark.parametrize("n_idle", [1, 3, 9])
def test_it_stops_when_somebody_comes(small: kvg.Model, n_idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token takes as many steps as where nothing is compressed, and nothing is read meanwhile."""
    read, sizes = Repetition.read, list[int]()

    def counted(repetition: Repetition, n: int) -> None:
        sizes.append(n)
        read(repetition, n)

    monkeypatch.setattr(Repetition, "read", counted)
    asked, other = prompts(small), ids_of(small, 300, 9)
    with engine_of(small, prefix_compress=None) as engine:
        used(engine, asked)
        assert rest(engine) == 1
        n_steps = first_token(engine, other)
    with engine_of(small) as engine:
        used(engine, asked)
        n_used = engine.stats().cells_used[0]
        for _ in range(n_idle):
            assert engine.step()
        assert engine.stats().cells_used[0] <= n_used + PART * n_idle
        n_read = len(sizes)
        assert first_token(engine, other) == n_steps
        assert len(sizes) == n_read
        assert engine.stats().cells_used[0] == n_used + len(other) + 2
        assert rest(engine) > 1  # parts that were read whole are not read again
        assert max(sizes) == PART
        assert engine.submit(asked[4], BRIEF, compressed=True).result().cache.edited > 0


def test_a_cache_that_is_full_of_other_texts(small: kvg.Model) -> None:
    """The one that was used longest ago makes way, by as many cells as a part of the prefix takes."""
    asked = prompts(small)
    others = [ids_of(small, n, 50 + n) for n in (640, 800)]
    with engine_of(small) as engine:
        for other in others:
            engine.submit(other, BRIEF).result()
        used(engine, asked)
        assert engine.context.kv.n_free < 32
        assert (engine.stats().n_compressed, engine.stats().n_to_compress) == (0, 1)
        rest(engine)
        assert (engine.stats().n_compressed, engine.stats().n_to_compress) == (1, 0)
        assert engine.find_prefix(others[1]) == len(others[1])
        assert len(others[0]) - 320 <= engine.find_prefix(others[0]) < len(others[0])
        assert engine.submit(asked[3], BRIEF, compressed=True).result().cache.edited > 0


def test_what_is_pinned(small: kvg.Model) -> None:
    """It needs to be read but once."""
    asked = prompts(small)
    with engine_of(small, pin_cells=1000) as engine:
        engine.submit(asked[0], BRIEF, pins=[kvg.Pin(N, 60)]).result()
        rest(engine)
        assert engine.submit(asked[1], BRIEF, compressed=True).result().cache.edited > 0
        engine.submit(asked[2][:500], BRIEF, pins=[kvg.Pin(400, 60)]).result()
        assert rest(engine) == 1  # shorter ones aren't worth it


def test_samples_and_texts_that_come_back(small: kvg.Model) -> None:
    """Each of several samples sees it; one that is parked goes on behind it."""
    asked = prompts(small)
    with engine_of(small, n_seq_max=3) as engine:
        used(engine, asked)
        rest(engine)
        alone = engine.submit(asked[3], kvg.SamplingParams(max_tokens=8), compressed=True).result()
        params = kvg.SamplingParams(max_tokens=8, n=2)
        both = engine.submit(asked[3], params, compressed=True).results()
        assert [each.tokens for each in both] == [alone.tokens] * 2
        request = engine.submit(asked[3], kvg.SamplingParams(max_tokens=8), compressed=True)
        for _ in range(4):
            engine.step()
        assert engine.park(request)
        rest(engine)
        assert engine.resume(request)
        assert request.result().tokens == alone.tokens
        with pytest.raises(kvg.CacheFullError, match="n_seq_max is 3"):
            engine.submit(asked[3], kvg.SamplingParams(n=4))


def test_a_reading_that_fails_is_left(small: kvg.Model) -> None:
    asked = prompts(small)
    with engine_of(small) as engine:
        used(engine, asked)
        engine.step()
        with fault("compute"):
            engine.step()
        assert rest(engine) <= 2
        assert engine.submit(asked[3], BRIEF, compressed=True).result().cache.edited == 0
        rest(engine)
        assert engine.submit(asked[4], BRIEF, compressed=True).result().cache.edited > 0


def test_cells_that_can_not_be_had(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as there are sequences for compressed prefixes: each is free again."""

    def refuse(found: object, seq: int) -> None:
        refused.append(seq)
        raise kvg.DeviceError("no memory")

    asked, refused = prompts(small), list[int]()
    with engine_of(small) as engine:
        kept = engine._loop.stepper._compressed
        assert kept is not None
        for _ in range(N_KEPT + 1):
            used(engine, asked)
            with monkeypatch.context() as patch:
                patch.setattr(engine._loop.stepper._index, "attach", refuse)
                rest(engine)
        assert (len(refused), kept.n_kept) == (N_KEPT + 1, 0)
        used(engine, asked)
        rest(engine)
        assert kept.n_kept == 1


def test_in_the_background(small: kvg.Model) -> None:
    asked = prompts(small)
    with engine_of(small, background=True) as engine:
        used(engine, asked)
        end = time.monotonic() + 60
        while not engine._loop.stepper._compressed.n_kept:  # type: ignore[union-attr]
            assert time.monotonic() < end
            engine.look()  # which doesn't count as somebody who has come
            time.sleep(0.01)
        assert engine.submit(asked[3], BRIEF, compressed=True).result().cache.edited > 0


@pytest.mark.parametrize("share", [0, 1, "half"])
def test_what_is_no_share(small: kvg.Model, share: Any) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="prefix_compress"):
        engine_of(small, prefix_compress=share)
    with pytest.raises(kvg.InvalidArgumentError, match="without prefix_cache"):
        engine_of(small, prefix_cache=False)


def test_where_it_can_not_be(small: kvg.Model, architecture: Callable[[ArchSpec], Path]) -> None:
    with pytest.raises(kvg.UnsupportedError, match="where the CPU computes attention"):
        engine_of(small, flash_attn="on", type_k="f16", type_v="f16")
    windows = ArchSpec("gemma3", n_layer=6, window=24, period=3)
    with (
        kvg.Model(architecture(windows), device="cpu") as model,
        pytest.raises(kvg.UnsupportedError, match="window"),
    ):
        engine_of(model)


@pytest.mark.parametrize("overcommit", [False, True])
def test_nothing_is_lost_or_left(small: kvg.Model, overcommit: bool) -> None:
    """Beside texts that forget, and under faults, who didn't ask gets exact cells alone."""
    soak = PrefixSoak(small, 2 + overcommit, overcommit)
    soak.run(1000 if chance.THOROUGH else 200, faults=has_faults())
    if chance.THOROUGH:
        assert soak.n_forgotten > 0
        assert soak.n_edited > 0 or overcommit  # cells are rarely empty then
    soak.close()

"""Conversations that are longer than their windows: a turn goes on from what the one before it has left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.faults import fault
from support.naive_scores import keydiff, lowest
from support.shifted import follows_alone
from support.soak import F32, has_faults

import pykvgraph as kvg
from pykvgraph.engine.own_rows import OwnRows

LLAMA = ArchSpec("llama", 2, 32, 2, 1, 16, 32)
N_CTX = 120
WINDOW = kvg.Window(N_CTX, forget="keydiff")
PARAMS = kvg.SamplingParams(max_tokens=30)


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(LLAMA), device=where.device) as model:
        yield model


def give_up(ctx: kvg.Context, n: int) -> int:
    """Half of the tokens that may be, by hand."""
    gone = lowest(keydiff(ctx), -(-(n - 4 - 64) // 2), 4)
    for p in reversed(gone):
        ctx.kv.seq_rm(0, p, p + 1)
        ctx.kv.seq_add(0, p + 1, -1, -1)
    return len(gone)


def engine_of(model: kvg.Model, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, background=False, **{"n_ctx": 400, "n_seq_max": 3, **F32, **options})


def said(engine: kvg.Engine, prompt: list[int], **options: Any) -> kvg.Completion:
    return engine.submit(prompt, PARAMS, **{"window": WINDOW, **options}).result()


def is_right(model: kvg.Model, prompt: list[int], done: kvg.Completion) -> bool:
    """Whether it has given up tokens, and said what a text says that is read from its beginning."""
    return follows_alone(model, prompt, list(done.tokens), N_CTX, give_up) > 0


def test_a_turn_goes_on(model: kvg.Model) -> None:
    """Each turn decodes its own tokens, and says what is said where all is read."""
    text = ids_of(model, 200, 1)
    with engine_of(model) as engine:
        done = said(engine, text)
        for turn in range(6):
            decoded = engine.stats().decoded_tokens
            text = [*text, *done.tokens, *ids_of(model, 7 + turn, 20 + turn)]
            done = said(engine, text)
            assert is_right(model, text, done)
            # of the last answer the last token was not decoded
            assert done.n_cached == len(text) - (7 + turn) - 1 == done.cache.cells
            assert engine.stats().decoded_tokens - decoded == 7 + turn + len(done.tokens)
            assert done.n_prompt + len(done.tokens) - 1 - done.n_discarded < N_CTX


def test_the_turn_that_fills_its_window(model: kvg.Model) -> None:
    """The cells are no more than the window is, and the text before was whole: it is not read again."""
    text = ids_of(model, 80, 11)
    with engine_of(model, n_ctx=N_CTX, n_seq_max=1, overcommit=True) as engine:
        done = engine.submit(text, kvg.SamplingParams(max_tokens=30), window=WINDOW).result()
        assert done.n_discarded == 0
        later = [*text, *done.tokens, *ids_of(model, 20, 12)]
        answer = said(engine, later)
        assert is_right(model, later, answer)
        assert answer.n_cached >= 96


def test_another_end(model: kvg.Model) -> None:
    """The last tokens of the answer come back as others, as templates have it."""
    text = ids_of(model, 200, 2)
    with engine_of(model) as engine:
        done = said(engine, text)
        for n_same in (28, 0):
            later = [*text, *done.tokens[:n_same], *ids_of(model, 9, 30 + n_same)]
            answer = said(engine, later)
            assert is_right(model, later, answer)
            text, done = later, answer
            assert answer.n_cached > 150 or not n_same


def test_others_need_the_cells(model: kvg.Model) -> None:
    """The rows wait in host memory, and no more texts than there are sequences have any."""
    texts = [ids_of(model, 200, 3 + i) for i in range(4)]
    with engine_of(model) as engine:
        done = [said(engine, text) for text in texts]
        held = engine.context.kv.groups[0].n_used
        assert held > 200
        engine.submit(ids_of(model, 370, 9), kvg.SamplingParams(max_tokens=30)).result()
        assert not engine._loop.stepper._running_set.kept
        for i, text, before in reversed([*zip(range(4), texts, done, strict=True)]):
            later = [*text, *before.tokens, 5]
            answer = said(engine, later)
            assert is_right(model, later, answer)
            assert (answer.n_cached > 200) == (i > 0)


@pytest.mark.parametrize(
    "options",
    [
        {"salt": "other"},
        {"window": kvg.Window(N_CTX, forget="window")},
        {"window": kvg.Window(N_CTX, 9, forget="keydiff")},
        {"window": kvg.Window(N_CTX + 1, forget="keydiff")},
    ],
)
def test_who_does_not_go_on(model: kvg.Model, options: dict[str, Any]) -> None:
    text = ids_of(model, 200, 4)
    with engine_of(model) as engine:
        later = [*text, *said(engine, text).tokens, 5]
        assert said(engine, later, **options).n_cached < N_CTX
        assert said(engine, later).n_cached == len(later) - 2


def test_it_is_forgotten(model: kvg.Model) -> None:
    text = ids_of(model, 200, 5)
    with engine_of(model) as engine:
        later = [*text, *said(engine, text).tokens, 5]
        engine.forget_prefix(text)
        engine.forget_prefix(later)
        assert engine.context.kv.groups[0].n_used == 0
        answer = said(engine, later)
        assert answer.n_cached == 0
        assert is_right(model, later, answer)


@pytest.mark.parametrize("cancels", [False, True])
def test_nothing_is_kept_without_prefix_cache(model: kvg.Model, cancels: bool) -> None:
    """Nobody would go on from it."""
    with engine_of(model, prefix_cache=False) as engine:
        request = engine.submit(ids_of(model, 200, 5), PARAMS, window=WINDOW)
        next(iter(request))
        if cancels:
            request.cancel()
        request.result()
        assert engine.context.kv.groups[0].n_used == 0


def test_pins_of_a_longer_prompt(model: kvg.Model) -> None:
    """They keep nothing."""
    with engine_of(model) as engine:
        assert said(engine, ids_of(model, 200, 5), pins=[kvg.Pin(64, 3600)]).pinned == ()
        assert engine.stats().n_pinned == 0


def test_pins_make_way(model: kvg.Model) -> None:
    """Nobody else runs, and there are too few cells beside what is pinned."""
    text = ids_of(model, 200, 12)
    with engine_of(model, n_ctx=130, pin_cells=100) as engine:
        later = [*text, *said(engine, text).tokens, 5]
        engine.submit(ids_of(model, 64, 13), PARAMS, pins=[kvg.Pin(64, 3600)]).result()
        assert engine.stats().n_pinned == 64
        request = engine.submit(later, PARAMS, window=WINDOW)
        for _ in range(100):
            engine.step()
        assert request.done
        assert is_right(model, later, request.result())
        assert request.result().n_cached == len(later) - 2


def test_rows_that_can_not_be_shown(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn is read from its beginning."""
    text = ids_of(model, 200, 14)
    with engine_of(model) as engine:
        later = [*text, *said(engine, text).tokens, 5]
        with monkeypatch.context() as patch:
            patch.setattr(OwnRows, "show", refuse)
            answer = said(engine, later)
        assert is_right(model, later, answer)
        assert answer.n_cached < N_CTX
        stats = engine.stats()
        assert stats.prompt_tokens == len(text) + len(later)
        assert (stats.n_running, stats.n_waiting) == (0, 0)


@pytest.mark.parametrize("parks", [False, True])
def test_rows_that_can_not_be_copied(model: kvg.Model, monkeypatch: pytest.MonkeyPatch, parks: bool) -> None:
    """Others need their cells before the turn runs, and there is no memory for them: it is read, too."""
    text = ids_of(model, 200, 15)
    with engine_of(model) as engine:
        later = [*text, *said(engine, text).tokens, 5]
        other = engine.submit(ids_of(model, 200, 16), kvg.SamplingParams(max_tokens=180))
        engine.step()
        request = engine.submit(later, kvg.SamplingParams(max_tokens=100), window=WINDOW)
        engine.step()
        kept = engine._loop.stepper._running_set.kept
        assert kept
        if parks:
            engine.park(request)
        with monkeypatch.context() as patch:
            patch.setattr(OwnRows, "copy", refuse)
            other.result()
        assert not kept
        if parks:
            engine.resume(request)
        answer = request.result()
        assert is_right(model, later, answer)
        assert answer.n_cached < N_CTX


def refuse(*_: object) -> None:
    raise kvg.DeviceError("no memory")


def test_an_answer_that_was_cancelled(model: kvg.Model) -> None:
    text = ids_of(model, 200, 6)
    with engine_of(model) as engine:
        request = engine.submit(text, kvg.SamplingParams(max_tokens=200), window=WINDOW)
        pieces = [*itertools.islice(request, 20)]
        request.cancel()
        later = [*text, *(piece.token for piece in pieces), 5]
        answer = said(engine, later)
        assert is_right(model, later, answer)
        assert answer.n_cached > 200


def test_a_request_that_is_cancelled_before_it_runs(model: kvg.Model) -> None:
    """Nothing is left of what it would have gone on from."""
    text = ids_of(model, 200, 7)
    with engine_of(model, n_ctx=130) as engine:
        later = [*text, *said(engine, text).tokens, 5]
        other = engine.submit(ids_of(model, 100, 8), kvg.SamplingParams(max_tokens=20))
        engine.step()
        request = engine.submit(later, PARAMS, window=WINDOW)
        for _ in range(3):
            engine.step()
        request.cancel()
        other.result()
        assert not engine._loop.stepper._running_set.kept
        answer = said(engine, later)
        assert is_right(model, later, answer)


@pytest.mark.skipif(not has_faults(), reason="the library has no test hooks")
def test_a_text_that_failed_leaves_nothing(model: kvg.Model) -> None:
    text = ids_of(model, 200, 9)
    with engine_of(model) as engine:
        request = engine.submit(text, kvg.SamplingParams(max_tokens=100), window=WINDOW)
        said_by_then = [piece.token for piece in itertools.islice(request, 10)]
        with fault("compute"), pytest.raises(kvg.KVGraphError):
            request.result()
        answer = said(engine, [*text, *said_by_then, 5])
        assert is_right(model, [*text, *said_by_then, 5], answer)
        assert answer.n_cached < N_CTX

"""Texts that are read in parts: others have their steps in between, and their cells."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import where
from support.ctrl_c import heard
from support.embedder import cosine
from support.engines import ids_of
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.context.pooling import POOLINGS
from pykvgraph.engine.prompt_scores import prompt_scores

N_TOKENS = 300
N_PART = 16 if where.is_cpu() else 64  # tokens of a part beside others
N_PARTS = -(-N_TOKENS // N_PART)


def engine_of(model: kvg.Model, n_ctx: int = 1024, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=n_ctx, n_seq_max=3, **{"background": False, **F32, **options})


class Parts:
    """Hears what is decoded for texts that are read: how many tokens, and behind how many steps of others."""

    def __init__(self, engine: kvg.Engine, before: Callable[[int], None] = lambda number: None) -> None:
        """before(number): called before each part; the first is number 1."""
        self.n_tokens: list[int] = []
        self.steps: list[int] = []
        self.engine, self.before, self.decode = engine, before, engine.context.decode
        engine.context.decode = self  # type: ignore[method-assign,assignment]

    def __call__(self, batch: kvg.Batch, *, scores: bool = False, repair: bool = False) -> None:
        self.n_tokens.append(len(batch))
        self.steps.append(self.engine.stats().steps)
        self.before(len(self.n_tokens))
        self.decode(batch, scores=scores, repair=repair)


def is_as_before(engine: kvg.Engine, running: kvg.Request) -> bool:
    """Whether nobody has cells or a sequence but the one text that runs."""
    look = engine.look()
    (text,) = look.running
    is_free = engine._loop.stepper._scheduler.n_free_seqs == engine.context.n_seq_max - 1
    return is_free and not running.done and look.groups[0].n_used == text.n_decoded


@pytest.mark.skipif(not where.is_cpu(), reason="parts are larger on other devices")
@pytest.mark.parametrize("pooling", POOLINGS)
def test_others_have_a_step_between_two_parts(model: kvg.Model, pooling: Any) -> None:
    ids, other = ids_of(model, N_TOKENS, 1), ids_of(model, 30, 2)
    with engine_of(model) as engine:
        parts = Parts(engine)
        alone = engine.embed(ids, pooling)
        n_alone = len(parts.n_tokens)
        assert n_alone == {"first": 1, "last": 1}.get(pooling, 5)
        running = engine.submit(other, kvg.SamplingParams(max_tokens=40))
        engine.step()
        beside = engine.embed(ids, pooling)
        n_beside, steps = parts.n_tokens[n_alone:], parts.steps[n_alone:]
        assert sum(n_beside) == (1 if pooling == "first" else N_TOKENS)
        assert max(n_beside) <= N_PART
        assert steps == list(range(steps[0], steps[0] + len(n_beside)))  # one part a step
        assert cosine(alone.ravel(), beside.ravel()) > 1 - 1e-5
        assert is_as_before(engine, running)
        assert are_likeliest(model, other, running.result().tokens)


@pytest.mark.skipif(not where.is_cpu(), reason="parts are larger on other devices")
def test_a_part_of_it_or_of_a_prompt_is_decoded_in_a_step(model: kvg.Model) -> None:
    """With both, the text that talks would wait twice as long for its next token."""
    other, prompt = ids_of(model, 30, 2), ids_of(model, N_TOKENS, 3)
    with engine_of(model) as engine:
        running = engine.submit(other, kvg.SamplingParams(max_tokens=60))
        engine.step()
        beside = engine.submit(prompt, kvg.SamplingParams(max_tokens=4))
        parts = Parts(engine)
        engine.embed(ids_of(model, N_TOKENS, 1))
        between = np.diff(parts.steps).tolist()
        assert between[:4] == [2] * 4 and between[-4:] == [1] * 4  # the prompt has been read by then
        assert are_likeliest(model, other, running.result().tokens)
        assert are_likeliest(model, prompt, beside.result().tokens)


def test_their_cells_are_counted(model: kvg.Model) -> None:
    """150 are read beside a text of at most 80; one of 120 that comes meanwhile enters behind them."""
    with engine_of(model, n_ctx=256) as engine:
        first, late = ids_of(model, 20, 1), ids_of(model, 100, 2)
        running = engine.submit(first, kvg.SamplingParams(max_tokens=60))
        engine.step()
        waits = engine.submit(late, kvg.SamplingParams(max_tokens=20))
        engine.embed(ids_of(model, 150, 3))
        assert engine.stats().n_preempted == 0
        assert are_likeliest(model, first, running.result().tokens)
        assert are_likeliest(model, late, waits.result().tokens)


def test_only_the_cells_of_its_own_time(model: kvg.Model) -> None:
    """A text that may fill the cache some day keeps nobody out whose few steps are over before."""
    with engine_of(model, n_ctx=256) as engine:
        first = ids_of(model, 20, 1)
        running = engine.submit(first, kvg.SamplingParams(max_tokens=230))
        engine.step()
        engine.embed(ids_of(model, 150, 3))
        assert is_as_before(engine, running)
        assert are_likeliest(model, first, running.result().tokens)


def test_it_waits_for_room(model: kvg.Model) -> None:
    """And nobody who came later enters before it."""
    with engine_of(model, n_ctx=256) as engine:
        running = engine.submit(ids_of(model, 150, 1), kvg.SamplingParams(max_tokens=20))
        engine.step()
        later = engine.submit(ids_of(model, 20, 2), kvg.SamplingParams(max_tokens=8))
        vector = engine.embed(ids_of(model, 150, 3))
        assert running.done
        assert not later.done
        assert np.isfinite(vector).all()
        assert running.result().finish_reason == later.result().finish_reason == "length"


@pytest.mark.parametrize("n_read", [129, 200])
def test_with_overcommit_others_are_set_aside(model: kvg.Model, n_read: int) -> None:
    """Where both lack cells, nobody fails: the text that runs comes back behind the other one."""
    with engine_of(model, n_ctx=256, overcommit=True) as engine:
        first = ids_of(model, 50 if n_read == 200 else 120, 1)
        running = engine.submit(first, kvg.SamplingParams(max_tokens=130))
        while engine.stats().cells_used[0] < 256 - n_read - 2:
            engine.step()
        engine._loop.stepper._budget._n_beside = 1  # so that it takes long
        vector = engine.embed(ids_of(model, n_read, 2))
        assert np.isfinite(vector).all()
        assert engine.stats().n_preempted > 0
        assert are_likeliest(model, first, running.result().tokens)


def test_who_leaves_ends_it(model: kvg.Model) -> None:
    with engine_of(model) as engine:
        running = engine.submit(ids_of(model, 30, 2), kvg.SamplingParams(max_tokens=60))
        engine.step()
        wanted = iter([True] * N_PARTS + [True, True, False])
        parts = Parts(engine)
        ids = ids_of(model, N_TOKENS, 1)
        assert len(engine._embed_all([ids, ids, ids], "mean", None, lambda: next(wanted))) == 1
        assert len(parts.n_tokens) == N_PARTS + 2
        assert is_as_before(engine, running)


@pytest.mark.parametrize("read", [kvg.Engine.embed, lambda engine, ids: prompt_scores(engine, ids, 1)])
def test_what_fails_leaves_nothing(model: kvg.Model, read: Callable[..., Any]) -> None:
    def breaks(number: int) -> None:
        if number == 2:
            raise kvg.DeviceError("broken")

    with engine_of(model) as engine:
        other = ids_of(model, 30, 2)
        running = engine.submit(other, kvg.SamplingParams(max_tokens=40))
        engine.step()
        parts = Parts(engine, breaks)
        with pytest.raises(kvg.DeviceError, match="broken"):
            read(engine, ids_of(model, N_TOKENS, 1))
        assert is_as_before(engine, running)
        assert len(read(engine, ids_of(model, N_TOKENS, 1))) > 0
        assert len(parts.n_tokens) == 2 + N_PARTS
        assert are_likeliest(model, other, running.result().tokens)


def test_a_device_that_fails_for_others(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole cache is lost with the text that runs: what is read fails too, and the next one is right."""
    ids, left = ids_of(model, N_TOKENS, 1), [1, 1]

    def breaks(*_: Any, **__: Any) -> Any:
        if left:
            left.pop()
            raise kvg.DeviceError("broken")
        return None

    with engine_of(model) as engine:
        alone = engine.embed(ids)
        running = engine.submit(ids_of(model, 30, 2), kvg.SamplingParams(max_tokens=40))
        engine.step()
        monkeypatch.setattr(kvg.KVCache, "update", breaks)
        monkeypatch.setattr(engine.context, "decode_rows", breaks)
        with pytest.raises(kvg.DeviceError, match="cells of this one are lost"):
            engine.embed(ids)
        with pytest.raises(kvg.DeviceError, match="broken"):
            running.result()
        monkeypatch.undo()
        assert cosine(alone, engine.embed(ids)) > 1 - 1e-5
        assert engine.stats().cells_used[0] == 0


def test_ctrl_c_ends_it(model: kvg.Model) -> None:
    """Between two parts; the text that runs goes on."""
    with heard(), engine_of(model) as engine:
        other = ids_of(model, 30, 2)
        running = engine.submit(other, kvg.SamplingParams(max_tokens=40))
        engine.step()
        parts = Parts(engine, lambda number: signal.raise_signal(signal.SIGINT) if number == 2 else None)
        with pytest.raises(KeyboardInterrupt):
            engine.embed(ids_of(model, N_TOKENS, 1))
        engine.step()
        assert len(parts.n_tokens) == 2
        assert is_as_before(engine, running)
        assert are_likeliest(model, other, running.result().tokens)


def test_close_ends_it(model: kvg.Model) -> None:
    engine = engine_of(model, background=True)
    began = threading.Event()
    heard: list[str] = []

    def until_closed(number: int) -> None:
        began.set()
        while not engine.closed:
            time.sleep(0.001)

    def embed() -> None:
        try:
            engine.embed(ids_of(model, N_TOKENS, 1))
        except kvg.InvalidArgumentError as error:
            heard.append(str(error))

    parts = Parts(engine, until_closed)
    reader = threading.Thread(target=embed, daemon=True)
    reader.start()
    assert began.wait(20)
    engine.close()
    reader.join(20)
    assert heard == ["the engine was closed meanwhile"]
    assert len(parts.n_tokens) == 1

"""What fails costs the request that failed, and nobody else."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.ctrl_c import heard
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.engine.request_sequence import RequestSequence

PROMPT = [token % 200 + 3 for token in range(70)]
OTHER = [*PROMPT[:40], 7, 8, 9]
TALK = kvg.SamplingParams(max_tokens=10)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str, Callable[..., bool]], None]:
    """Makes a method raise DeviceError whenever the condition on its arguments is true."""

    def break_it(owner: type, name: str, when: Callable[..., bool]) -> None:
        method = getattr(owner, name)

        def fails(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                raise kvg.DeviceError("broken")
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, fails)

    return break_it


@pytest.mark.parametrize("sample", [0, 1, 2])
def test_a_sample_that_fails_ends_its_request(small: kvg.Model, broken: Any, sample: int) -> None:
    """While the others of its request are about to say a token, or have ended with it."""
    broken(
        RequestSequence, "say", lambda sequence, *_: sequence._sample == sample and len(sequence.ids) == 74
    )
    with kvg.Engine(small, n_ctx=512, n_seq_max=4, background=False, **F32) as engine:
        three = engine.submit(
            PROMPT, kvg.SamplingParams(max_tokens=5, n=3, temperature=1.0, seed=2)
        )  # three that go on
        other = engine.submit(OTHER, TALK)
        assert are_likeliest(small, OTHER, other.result().tokens)
        with pytest.raises(kvg.DeviceError, match="broken"):
            three.results()
        with pytest.raises(kvg.DeviceError, match="broken"):
            list(three)
        assert engine.stats().n_running == engine.stats().n_waiting == 0


def test_a_sequence_that_always_fails_ends_its_request(small: kvg.Model, broken: Any) -> None:
    """The first of three samples; the other two are in halves of the batch that were to come."""
    with kvg.Engine(small, n_ctx=512, n_seq_max=4, background=False, **F32) as engine:
        three = engine.submit(PROMPT, kvg.SamplingParams(max_tokens=9, n=3, temperature=1.0))
        engine.step()
        other = engine.submit(OTHER, TALK)
        decode = engine.context.decode_rows

        def fails(batch: kvg.Batch, **options: Any) -> Any:
            if not three.done and len(batch) < 3:
                raise kvg.DeviceError("broken")
            if not three.done:
                raise kvg.DeviceError("too many")
            return decode(batch, **options)

        engine.context.decode_rows = fails  # type: ignore[method-assign]
        assert are_likeliest(small, OTHER, other.result().tokens)
        with pytest.raises(kvg.DeviceError, match="broken"):
            three.results()


def test_what_can_not_be_shared_is_decoded(small: kvg.Model, broken: Any) -> None:
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, background=False, **F32) as engine:
        engine.submit(PROMPT, TALK).result()
        broken(kvg.KVCache, "attach", lambda *_: True)
        found = engine.submit(PROMPT, TALK).result()
    assert found.n_cached == 0
    assert are_likeliest(small, PROMPT, found.tokens)


def test_an_engine_that_breaks_tells_everybody(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody has foreseen, in the engine's own thread."""
    with kvg.Engine(small, n_ctx=512, n_seq_max=1, **F32) as engine:
        monkeypatch.setattr(engine.context, "decode_rows", lambda *_, **__: 1 // 0)
        requests = []
        with pytest.raises(kvg.InvalidArgumentError, match="engine is closed"):
            for _ in range(100_000):
                requests.append(engine.submit(PROMPT, TALK))
        for request in requests:
            with pytest.raises(ZeroDivisionError):
                request.result(10)


def ctrl_c_after(n_calls: int) -> Callable[..., None]:
    """For sys.setprofile: Ctrl-C when so many functions were called."""
    calls = itertools.count(1)

    def profile(_frame: Any, event: str, _arg: Any) -> None:
        if event == "call" and next(calls) == n_calls:
            signal.raise_signal(signal.SIGINT)

    return profile


@pytest.mark.parametrize("n_calls", range(3, 300, 27))
def test_ctrl_c_in_a_step_costs_nothing(small: kvg.Model, n_calls: int) -> None:
    """Wherever it comes: the step is whole, and the next one goes on with the same texts."""
    gc.collect()  # what others have left behind would be freed in the steps, where Python ignores Ctrl-C
    with heard(), kvg.Engine(small, n_ctx=512, n_seq_max=4, background=False, **F32) as engine:
        requests = [engine.submit(prompt, TALK) for prompt in (PROMPT, OTHER)]
        engine.step()
        with pytest.raises(KeyboardInterrupt):
            sys.setprofile(ctrl_c_after(n_calls))
            try:
                while engine.step():
                    pass
            finally:
                sys.setprofile(None)
        for prompt, request in zip((PROMPT, OTHER), requests, strict=True):
            found = request.result()
            assert len(found.tokens) == 10
            assert are_likeliest(small, prompt, found.tokens)


def test_a_second_ctrl_c_ends_the_engine(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to wait for a step that takes long."""

    def decode(*_args: Any, **_options: Any) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one was not heard")

    with heard(), kvg.Engine(small, n_ctx=512, n_seq_max=1, background=False, **F32) as engine:
        request = engine.submit(PROMPT, TALK)
        monkeypatch.setattr(engine.context, "decode_rows", decode)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(KeyboardInterrupt):
            request.result(1)
        with pytest.raises(kvg.InvalidArgumentError, match="engine is closed"):
            engine.submit(PROMPT, TALK)

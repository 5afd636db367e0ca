"""What fails costs the request that failed, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.engine.branch import Branch

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
    broken(Branch, "say", lambda branch, *_: branch._sample == sample and len(branch.ids) == 74)
    with kvg.Engine(small, n_ctx=512, n_seq_max=4, background=False, **F32) as engine:
        three = engine.submit(PROMPT, kvg.SamplingParams(max_tokens=5, n=3, temperature=1.0))
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
        decode = engine.context.decode

        def fails(batch: kvg.Batch, **options: Any) -> None:
            if not three.done and len(batch) < 3:
                raise kvg.DeviceError("broken")
            if not three.done:
                raise kvg.DeviceError("too many")
            decode(batch, **options)

        engine.context.decode = fails  # type: ignore[method-assign]
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
        monkeypatch.setattr(engine.context, "decode", lambda *_, **__: 1 // 0)
        requests = []
        with pytest.raises(kvg.InvalidArgumentError, match="engine is closed"):
            for _ in range(100_000):
                requests.append(engine.submit(PROMPT, TALK))
        for request in requests:
            with pytest.raises(ZeroDivisionError):
                request.result(10)

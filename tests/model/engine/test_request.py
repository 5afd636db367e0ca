"""A request, as those who wait for it see it: several at once, in event loops, and in a forked process."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

import pykvgraph as kvg

PROMPT = [token % 200 + 3 for token in range(40)]
TALK = kvg.SamplingParams(max_tokens=20)


async def tokens(request: kvg.Request) -> list[int]:
    return [piece.token async for piece in request]


def test_an_event_loop_takes_the_steps_where_nobody_else_does(small: kvg.Model) -> None:
    with kvg.Engine(small, n_ctx=256, n_seq_max=2, background=False) as engine:
        alone = engine.submit(PROMPT, TALK).result().tokens
        requests = [engine.submit(PROMPT, TALK) for _ in range(2)]

        async def both() -> list[list[int]]:
            return await asyncio.gather(*map(tokens, requests))

        assert asyncio.run(asyncio.wait_for(both(), 20)) == [list(alone)] * 2


@pytest.mark.parametrize("background", [True, False])
def test_two_who_listen_share_the_pieces(small: kvg.Model, background: bool) -> None:
    with kvg.Engine(small, n_ctx=256, n_seq_max=1, background=background) as engine:

        async def both() -> tuple[list[int], list[int]]:
            request = engine.submit(PROMPT, TALK)
            return await asyncio.gather(tokens(request), tokens(request))

        said = asyncio.run(asyncio.wait_for(both(), 20))
        assert sorted([*said[0], *said[1]]) == sorted(engine.submit(PROMPT, TALK).result().tokens)


def test_a_timeout_ends_the_steps_of_ones_own(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the step that is under way, and the next call goes on."""
    step = kvg.Engine.step

    def slow(engine: kvg.Engine) -> bool:
        time.sleep(0.01)
        return step(engine)

    monkeypatch.setattr(kvg.Engine, "step", slow)
    with kvg.Engine(small, n_ctx=256, n_seq_max=1, background=False) as engine:
        request = engine.submit(PROMPT, TALK)
        with pytest.raises(TimeoutError):
            request.result(timeout=0.02)
        assert engine.stats().steps < 5
        assert len(request.result(timeout=20).tokens) == 20


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_its_parents_request(small: kvg.Model) -> None:
    long = kvg.SamplingParams(max_tokens=200, logit_bias={0: 1e6})
    with kvg.Engine(small, n_ctx=256, n_seq_max=1) as engine:
        request = engine.submit(PROMPT, long)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            n_refused = 0
            for wait in (request.result, lambda: list(request), lambda: asyncio.run(tokens(request))):
                try:
                    wait()
                except kvg.InvalidArgumentError as error:
                    n_refused += "was forked" in str(error)
            os._exit(n_refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert len(request.result(20).tokens) == 200


def test_nobody_lets_a_parked_request_go_on(small: kvg.Model) -> None:
    """Whoever takes the steps himself would wait for ever."""
    with kvg.Engine(small, n_ctx=256, n_seq_max=1, background=False) as engine:
        request = engine.submit(PROMPT, TALK)
        engine.step()
        engine.park(request)
        said = engine.submit(PROMPT, TALK).result().tokens  # others go on
        with pytest.raises(kvg.InvalidArgumentError, match="resume"):
            request.result()
        with pytest.raises(kvg.InvalidArgumentError, match="resume"):
            list(request)
        with pytest.raises(kvg.InvalidArgumentError, match="resume"):
            asyncio.run(tokens(request))
        engine.resume(request)
        assert request.result().tokens == said

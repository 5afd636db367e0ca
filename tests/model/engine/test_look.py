"""Engine.look(): the cells and the texts between two steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import pykvgraph as kvg
from pykvgraph.engine.request_sequence import RequestSequence, Status

PROMPT = [token % 200 + 3 for token in range(70)]
TALK = kvg.SamplingParams(max_tokens=30, logit_bias={0: 1e6})


def test_a_look_between_steps_of_ones_own(small: kvg.Model) -> None:
    """Beside the cache's own snapshot, and what the steps must have done by then."""
    with kvg.Engine(small, n_ctx=256, n_seq_max=2, background=False) as engine:
        engine.submit(PROMPT, TALK)
        for _ in range(4):
            engine.step()
        engine.submit(PROMPT, TALK)
        engine.submit([*PROMPT, 5], kvg.SamplingParams(max_tokens=3, n=2))
        for _ in range(3):
            engine.step()
        look = engine.look()
        view = engine.context.kv.cells()
        for name in ("pos", "seq", "held", "shift"):
            assert np.array_equal(getattr(look.views[0], name), getattr(view, name))
        assert look.groups == engine.context.kv.groups
        first, second = look.running
        assert [(text.request, text.n_said, text.n_cached) for text in (first, second)] == [
            (1, 7, 0),
            (2, 3, 69),
        ]
        for text in (first, second):
            assert text.n_prompt == 70
            assert text.n_decoded == view.seq[:, text.seq].sum() == 70 + text.n_said - 1
            assert text.status == "decode"
        (waits,) = look.waiting
        assert waits.status == "waiting"
        assert (waits.request, waits.n_texts, waits.seq, waits.n_prompt, waits.n_cached) == (3, 2, -1, 71, -1)
        assert first.seconds > second.seconds > waits.seconds > 0
        assert look.stats == engine.stats()
        assert engine.look().stats.steps == look.stats.steps  # looking takes no step


def test_what_a_text_does(small: kvg.Model) -> None:
    """From its prompt, in parts, to its end; with a rest in between."""
    with kvg.Engine(small, n_ctx=256, n_seq_max=1, n_batch=32, background=False) as engine:
        request = engine.submit(PROMPT, kvg.SamplingParams(max_tokens=4))
        (sequence,) = request._sequences
        seen = [sequence.status]
        while not request.done:
            engine.step()
            seen.append(sequence.status)
            if seen.count(Status.DECODE) == 2:
                assert engine.park(request)
                seen.append(sequence.status)
                assert engine.resume(request)  # which takes a step
                seen.append(sequence.status)
        n_parts = -(-len(PROMPT) // 32)
        reads = [Status.WAITING, *[Status.PREFILL] * (n_parts - 1)]
        assert seen == [*reads, Status.DECODE, Status.DECODE, Status.PARKED, Status.DECODE, Status.DONE]


def test_a_sample_that_waits_for_its_grammar(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is known of it is decoded; the other sample has ended long before."""
    may_say = [True, False]
    monkeypatch.setattr(RequestSequence, "can_say", lambda sequence, _: may_say[sequence._sample])
    with kvg.Engine(small, n_ctx=256, n_seq_max=2, background=False) as engine:
        request = engine.submit(PROMPT, kvg.SamplingParams(max_tokens=3, n=2))
        one, other = request._sequences
        while not one.is_done:
            engine.step()
        assert (other.n_todo, other.unsaid is None) == (0, False)
        assert [one.status, other.status] == [Status.DONE, Status.DECODE]
        may_say[1] = True
        request.results(20)
        assert other.status == Status.DONE


@pytest.mark.usefixtures("decoding_is_slow")
def test_a_text_whose_rows_come_from_a_tier(small: kvg.Model) -> None:
    with kvg.Engine(small, n_ctx=256, n_seq_max=1, background=False, tiers=kvg.Tiers("64M")) as engine:
        engine.submit(PROMPT, kvg.SamplingParams(max_tokens=4)).result()
        engine.submit([5] * 240, kvg.SamplingParams(max_tokens=4)).result()  # which takes all cells
        request = engine.submit(PROMPT, kvg.SamplingParams(max_tokens=4))
        (sequence,) = request._sequences
        seen = [sequence.status]
        while not request.done:
            engine.step()
            seen.append(sequence.status)
        assert list(dict.fromkeys(seen)) == [Status.WAITING, Status.LOADING, Status.DECODE, Status.DONE]


def test_a_request_that_fails_is_done(small: kvg.Model) -> None:
    with kvg.Engine(small, n_ctx=256, n_seq_max=2, background=False) as engine:
        request = engine.submit(PROMPT, kvg.SamplingParams(max_tokens=4, n=2))
        sequences = request._sequences
        request._fail(kvg.KVGraphError("the test says so"))
        assert [each.status for each in sequences] == [Status.DONE] * 2


def test_whoever_looks_waits_for_a_step_at_most(small: kvg.Model) -> None:
    with kvg.Engine(small, n_ctx=2048, n_seq_max=2) as engine:
        idle = engine.look()
        assert not idle.running and np.array_equal(idle.views[0].pos, engine.context.kv.cells().pos)
        requests = [
            engine.submit(PROMPT, kvg.SamplingParams(max_tokens=400, logit_bias={0: 1e6})) for _ in range(2)
        ]
        looks = [engine.look() for _ in range(20)]
        for request in requests:
            request.cancel()
    assert all(view.n_used == look.stats.cells_used[0] for look in looks for view in look.views)
    steps = [look.stats.steps for look in looks]
    assert steps == sorted(steps)


def test_an_engine_that_ends_leaves_nobody_waiting(small: kvg.Model) -> None:
    engine = kvg.Engine(small, n_ctx=256, n_seq_max=1)
    refused: list[BaseException] = []

    def look() -> None:
        try:
            while True:
                engine.look()
        except kvg.InvalidArgumentError as error:
            refused.append(error)

    lookers = [threading.Thread(target=look) for _ in range(4)]
    for each in lookers:
        each.start()
    engine.close()
    for each in lookers:
        each.join(20)
    assert len(refused) == 4
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        kvg.Engine.look(engine)

"""A fault at every pass through every place, and in every stage of a step: nothing is half done.

Those of the native library need one that was built with KVGRAPH_TEST_HOOKS, as for `make test`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.chance import THOROUGH
from support.engines import ids_of
from support.faults import fault
from support.rollback import KnowingDrafter, Watched, accounts
from support.soak import F32, SITES, has_faults

import pykvgraph as kvg
from pykvgraph.engine import token_budget
from pykvgraph.engine.commands import Submit
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.gate import Acceptance
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.sampling.sampler import Sampler

Break = Callable[[Any, str, Callable[..., bool], type[BaseException]], None]


def engine_of(model: kvg.Model, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=256, n_seq_max=5, n_batch=48, background=False, **F32, **options)


# ---- faults of the native library


def story(engine: kvg.Engine, after_step: Callable[[], None] = lambda: None) -> list[kvg.Request]:
    """Texts that share, fork, come back, shift, are parked and are cancelled, to the end of all."""
    model, requests = engine.model, list[kvg.Request]()
    shared = ids_of(model, 70, 0)
    sampled = kvg.SamplingParams(max_tokens=6, temperature=1.0, n=2, seed=1)

    def ask(prompt: list[int], params: kvg.SamplingParams, n_steps: int, **options: Any) -> None:
        requests.append(engine.submit(prompt, params, **options))
        for _ in range(n_steps):
            engine.step()
            after_step()

    ask(shared, kvg.SamplingParams(max_tokens=8), 2)
    ask([*shared[:40], 7, 8], sampled, 3)
    if engine.can_shift:
        window = kvg.Window(50, 4)
        ask(ids_of(model, 44, 3), kvg.SamplingParams(max_tokens=12), 8, window=window)
        own = requests[-1]
        is_parked = not own.done and engine.park(own)
        ask(ids_of(model, 250, 4), kvg.SamplingParams(max_tokens=2), 12)  # whose prompt takes its cells
        if is_parked:
            engine.resume(own)
    ask(ids_of(model, 20, 2), kvg.SamplingParams(max_tokens=50), 2)
    requests[-1].cancel()
    ask(shared, sampled, 0)
    while engine.step():
        after_step()
    return requests


@pytest.fixture(autouse=True)
def steps_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step doesn't decide how many tokens of a prompt the next one has: two runs are compared."""
    monkeypatch.setattr(token_budget, "_USUAL", 1e6)  # seconds


def said_by(request: kvg.Request) -> list[Any] | None:
    """The tokens of each sample; None: a fault has ended it."""
    try:
        return [(each.finish_reason, each.tokens) for each in request.results()]
    except (kvg.DeviceError, MemoryError):
        return None


@pytest.fixture(params=[False, True], ids=["", "drafts"])
def drafter(request: Any, monkeypatch: pytest.MonkeyPatch) -> KnowingDrafter | None:
    """Of those tests that are done with drafts, too."""
    monkeypatch.setattr(Acceptance, "is_due", lambda self: True)
    return KnowingDrafter() if request.param else None


@contextlib.contextmanager
def drafting(model: kvg.Model, drafter: KnowingDrafter | None) -> Iterator[kvg.Engine]:
    with engine_of(model, draft=drafter and "ngram") as engine:
        if drafter:
            drafter.be_in(engine)
        yield engine


def is_as(said: list[Any], expected: list[Any] | None) -> bool:
    """Whether it is the same; drafts decide how far a text was when it was cancelled."""
    assert expected is not None
    if said[0][0] != "cancelled":
        return said == expected
    shorter, longer = sorted((said[0][1], expected[0][1]), key=len)
    return bool(longer[: len(shorter)] == shorter)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("stride", [11, pytest.param(1 if THOROUGH else 4, marks=pytest.mark.slow)])
def test_every_pass_through_a_place_that_fails(
    model: kvg.Model, drafter: KnowingDrafter | None, site: str, stride: int
) -> None:
    """Who has no error says what it says without the fault, and a decode that failed has changed no byte."""
    if not has_faults():
        pytest.skip("this libkvgraph was built without KVGRAPH_TEST_HOOKS")
    with drafting(model, drafter) as engine:
        expected = [said_by(each) for each in story(engine)]
    if drafter:
        drafter.know()
    n_raised, missed, countdown = 0, 0, 1
    while missed < 3:
        with drafting(model, drafter) as engine:
            decode = Watched(engine, engine.context, "decode_rows")
            with fault(site, countdown):
                found = [said_by(each) for each in story(engine)]
            lost = [said is None for said in found]
            assert sum(lost) <= 1
            for said, wanted in zip(found, expected, strict=True):
                assert said is None or is_as(said, wanted)
            index, kv = engine._loop.stepper._running_set.index, engine.context.kv
            index.clear()
            while index.drop_point():
                pass
            assert [group.n_used for group in kv.groups] == [0] * len(kv.groups)
            n_raised += decode.n_raised
            missed += not (decode.n_raised or any(lost))
            del engine.context.decode_rows
        countdown += stride
    assert drafter is None or drafter.n_drafts > 10
    assert n_raised or site not in ("cells", "build", "compute")


# ---- faults in one stage, for one request


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes a method raise whenever the condition on its arguments is true."""

    def break_it(owner: Any, name: str, when: Callable[..., bool], error: type[BaseException]) -> None:
        method = getattr(owner, name)

        def fails(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                raise error("broken")
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, fails)

    return break_it


class Race:
    """Two requests that go on, one sampled, and a third with two samples that shares with them, and fails."""

    def __init__(self, model: kvg.Model, drafter: KnowingDrafter | None = None) -> None:
        self.engine = engine_of(model, draft=drafter and "ngram")
        if drafter:
            drafter.be_in(self.engine)
        shared = ids_of(model, 70, 0)
        sampled = kvg.SamplingParams(max_tokens=30, temperature=1.0, seed=4)
        self.others = [
            self.engine.submit(shared, kvg.SamplingParams(max_tokens=30)),
            self.engine.submit([*shared[:40], 9], sampled),
        ]
        for _ in range(4):
            self.engine.step()
        params = kvg.SamplingParams(max_tokens=9, temperature=1.0, seed=5, n=2)
        self.third = self.engine.submit([*shared[:50], *ids_of(model, 20, 6)], params)

    def is_third(self, sequence: RequestSequence) -> bool:
        return sequence.request is self.third

    def has_third(self, batch: kvg.Batch, **_: Any) -> bool:
        running = self.engine._loop.stepper._running_set.scheduler.running
        return any(self.is_third(each) and each.seq in batch.snapshot().seq_id.tolist() for each in running)

    def step(self, n: int) -> None:
        for _ in range(n):
            self.engine.step()

    def cancel(self) -> dict[str, Any]:
        """The third is cancelled, without a step."""
        self.third.cancel()
        stepper = self.engine._loop.stepper
        stepper.commands.run(stepper._running_set, stepper._readings)
        return accounts(self.engine)

    def end(self) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """What the others say, and what is left behind them."""
        said = [request.result().tokens for request in self.others]
        left = accounts(self.engine)
        self.engine.close()
        return [(tokens, left) for tokens in said]


def cut_short(
    model: kvg.Model, n_steps: int, *, and_step: bool, drafter: KnowingDrafter | None = None
) -> tuple[dict[str, Any], Any]:
    """The third is cancelled after so many steps; and_step: the others then take one more."""
    race = Race(model, drafter)
    race.step(n_steps)
    found = race.cancel()
    if and_step:
        race.step(1)
        found = accounts(race.engine)
    return found, race.end()


def check_failed(race: Race, error: type[BaseException]) -> tuple[dict[str, Any], Any]:
    with pytest.raises(error, match="broken"):
        race.third.results(0)
    return accounts(race.engine), race.end()


@pytest.mark.parametrize("error", [kvg.DeviceError, MemoryError])
@pytest.mark.parametrize("n_steps", [0, 1, 3, 6])
def test_a_decode_that_fails_is_as_if_it_were_cancelled_before(
    model: kvg.Model, breaks: Break, n_steps: int, error: type[BaseException]
) -> None:
    race = Race(model)
    race.step(n_steps)
    breaks(race.engine.context, "decode_rows", race.has_third, error)
    race.step(1)
    assert check_failed(race, error) == cut_short(model, n_steps, and_step=True)


@pytest.mark.parametrize("n_steps", [1, 5])
def test_outputs_that_can_not_be_read_are_no_outputs(model: kvg.Model, breaks: Break, n_steps: int) -> None:
    """The library has decoded the batch, and there is no memory for what comes of it: all is taken back."""
    race = Race(model)
    race.step(n_steps)
    ctx, batch = race.engine.context, race.engine._loop.stepper._model_run._batch
    breaks(ctx, "_scores", lambda: race.has_third(batch), MemoryError)
    decode = Watched(race.engine, ctx, "decode_rows")
    while not race.third.done:
        race.step(1)
        n_steps += 1
    assert decode.n_raised
    assert check_failed(race, MemoryError) == cut_short(model, n_steps - 1, and_step=True)


@pytest.mark.parametrize("error", [kvg.DeviceError, MemoryError])
@pytest.mark.parametrize(
    ("stage", "sample", "nth"), [("say", 0, 1), ("say", 1, 1), ("say", 1, 3), ("sample", 0, 2)]
)
def test_a_token_that_can_not_be_said(
    model: kvg.Model,
    breaks: Break,
    drafter: KnowingDrafter | None,
    stage: str,
    sample: int,
    nth: int,
    error: type[BaseException],
) -> None:
    """As if it were cancelled behind that step; samplers of the others are where they were."""
    if drafter:
        plain = Race(model, drafter)
        plain.third.results()
        plain.end()
        drafter.know()
    race = Race(model, drafter)
    n_said = 0

    def when(sequence: RequestSequence, *_: object) -> bool:
        nonlocal n_said
        n_said += race.is_third(sequence) and sequence._sample == sample
        return race.is_third(sequence) and sequence._sample == sample and n_said == nth

    if stage == "say":
        breaks(RequestSequence, "say", when, error)
    else:
        new = race.engine._loop.stepper.commands.new
        third = next(each.sequence for each in new if isinstance(each, Submit))
        samplers = {id(third._output._sampler): third}
        breaks(Sampler, "sample", lambda self, _: id(self) in samplers and when(samplers[id(self)]), error)
    n_steps = 0
    while not race.third.done:
        race.step(1)
        n_steps += 1
    left, said = check_failed(race, error)
    left_by_cancelled, expected = cut_short(model, n_steps, and_step=False, drafter=drafter)
    if drafter:  # who is cancelled has the whole step behind it, and the index more of it
        assert drafter.n_drafts > 0
        assert [tokens for tokens, _ in said] == [tokens for tokens, _ in expected]
    else:
        assert (left, said) == (left_by_cancelled, expected)


@pytest.mark.parametrize("error", [kvg.DeviceError, MemoryError])
def test_what_is_left_of_a_draft_can_not_be_removed(
    model: kvg.Model, breaks: Break, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The text is set aside, and comes back: it says the same, and nothing is left."""
    monkeypatch.setattr(Acceptance, "is_due", lambda self: True)
    drafter = KnowingDrafter()
    plain = Race(model, drafter)
    expected = [each.tokens for each in plain.third.results()], plain.end()
    drafter.know()
    race = Race(model, drafter)
    calls = itertools.count()
    breaks(kvg.KVCache, "seq_rm", lambda _, seq, p0, *__: p0 > 0 and next(calls) in (1, 4), error)
    assert [each.tokens for each in race.third.results()] == expected[0]
    assert [tokens for tokens, _ in race.end()] == [tokens for tokens, _ in expected[1]]
    assert next(calls) > 5


@pytest.mark.parametrize("error", [kvg.DeviceError, MemoryError])
def test_a_fork_that_fails(model: kvg.Model, breaks: Break, error: type[BaseException]) -> None:
    race = Race(model)
    breaks(kvg.KVCache, "seq_cp", lambda *_: True, error)
    n_steps = 0
    while not race.third.done:
        race.step(1)
        n_steps += 1
    assert check_failed(race, error) == cut_short(model, n_steps, and_step=False)


@pytest.mark.parametrize("n_good", [0, 1])
@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (kvg.KVCache, "attach", kvg.DeviceError),
        (kvg.KVCache, "attach", MemoryError),
        (kvg.KVCache, "hold", MemoryError),
        (kvg.KVCache, "resume_point", kvg.DeviceError),
        (kvg.KVCache, "resume_point", kvg.CacheFullError),
        (kvg.KVCache, "resume_point", MemoryError),
        (PrefixIndex, "_hold_anew", MemoryError),
    ],
)
def test_what_can_not_be_kept_is_decoded_again(
    model: kvg.Model, breaks: Break, owner: Any, name: str, error: type[BaseException], n_good: int
) -> None:
    """Nobody fails, and everybody says the same: the index only has less. n_good: calls that work."""
    plain = Race(model)
    expected = [each.tokens for each in plain.third.results()], [tokens for tokens, _ in plain.end()]
    race = Race(model)
    calls = itertools.count()
    breaks(owner, name, lambda *_, **__: next(calls) >= n_good, error)
    assert ([each.tokens for each in race.third.results()], [tokens for tokens, _ in race.end()]) == expected

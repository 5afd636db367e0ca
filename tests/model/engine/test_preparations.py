"""Engine.prepare: what a prompt to come begins with is decoded while nobody waits."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support import chance
from support.chance import THOROUGH
from support.engines import ids_of
from support.faults import fault
from support.rollback import accounts
from support.soak import F32, SITES, Soak, are_likeliest, has_faults

import pykvgraph as kvg
from pykvgraph.engine import edits, token_budget

N_TURNS, N_THOUGHTS, N_SAID = (20, 300, 60) if THOROUGH else (5, 30, 40)
REPAIR = 32  # arXiv:2410.15332


@pytest.fixture(autouse=True)
def steps_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow step doesn't decide how many tokens of a text the next one has: steps are counted."""
    monkeypatch.setattr(token_budget, "_USUAL", 1e6)  # seconds


def engine_of(model: kvg.Model, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, **{"n_ctx": 512, "n_seq_max": 3, "background": False, **F32, **options})


def run_out(engine: kvg.Engine) -> int:
    """Steps until there is nothing to do."""
    n = 1
    while engine.step():
        n += 1
    return n


class Talk:
    """A conversation whose thoughts are dropped from its history, as templates do: by their tokens.

    The prompt opens the thought: two tokens that the history lacks, too.
    """

    def __init__(self, engine: kvg.Engine, seed: int = 1, **options: Any) -> None:
        self.engine, self.options, self._rng = engine, options, Random(seed)
        self.history = self._ids(40)
        self.said: list[tuple[int, ...]] = []
        self.n_old: list[int] = []  # tokens of the history that each prompt had decoded

    def turn(self, n_thoughts: int = N_THOUGHTS, n_said: int = N_SAID) -> kvg.Completion:
        prompt = [*self.history, *self._ids(10), 5, 6]
        params = kvg.SamplingParams(max_tokens=n_thoughts + n_said, logit_bias={2: -100.0})  # it goes on
        told = self.engine.submit(prompt, params, **self.options).result()
        self.n_old.append(max(len(self.history) - told.n_cached, 0))
        self.said.append(told.tokens)
        self.spoken = [*prompt, *told.tokens]
        self.history = [*prompt[:-2], *told.tokens[n_thoughts:], 7, 8]
        return told

    def prepare(self) -> None:
        self.engine.prepare(self.history, instead_of=self.spoken, **self.options)

    def _ids(self, n: int) -> list[int]:
        return [self._rng.randrange(9, self.engine.model.n_vocab) for _ in range(n)]


def test_a_turn_decodes_its_own_tokens_only(model: kvg.Model) -> None:
    """On each kind of model; what is said is what it is without."""
    n_ctx = 3 * N_TURNS * (N_THOUGHTS + N_SAID)
    with engine_of(model, n_ctx=n_ctx) as engine, engine_of(model, n_ctx=n_ctx) as plain:
        ours, others = Talk(engine), Talk(plain)
        for _ in range(N_TURNS):
            for talk in (ours, others):
                talk.turn()
            ours.prepare()
            run_out(engine)
            assert engine.find_prefix(ours.history) == len(ours.history)
        assert ours.said == others.said
        assert ours.n_old[1:] == [0] * (N_TURNS - 1)
        assert min(others.n_old[1:]) >= N_SAID
        found, without = engine.stats(), plain.stats()
        # all of it nobody waited for, and that is what has been saved
        assert found.decoded_tokens - found.prepared_tokens <= without.decoded_tokens - sum(others.n_old[1:])
        assert found.prompt_tokens == without.prompt_tokens


def test_thoughts_are_cut_out_of_the_cells(small: kvg.Model) -> None:
    """edit="approximate": what was said moves, and only its first and last tokens are decoded again."""
    with engine_of(small, n_ctx=2048) as engine:
        talk = Talk(engine, edit="approximate", session="a")
        for _ in range(2):
            before = engine.stats().prepared_tokens
            talk.turn(50, 150)
            talk.prepare()
            run_out(engine)
            assert engine.stats().prepared_tokens - before == 2 * REPAIR
        told = talk.turn(1, 5)
        assert talk.n_old == [40, 0, 0]
        assert told.cache.edited >= 150 - REPAIR
        exact = engine.submit(talk.spoken, kvg.SamplingParams(max_tokens=4), session="a").result()
        assert exact.cache.edited == 0
        assert are_likeliest(small, talk.spoken, exact.tokens)


@pytest.mark.parametrize("edit", ["exact", "approximate"])
def test_whoever_comes_waits_for_one_part(small: kvg.Model, edit: Any) -> None:
    """Steps to the first token are those without a preparation, and it goes on behind the answer."""
    other, brief = ids_of(small, 100, 9), kvg.SamplingParams(max_tokens=3)
    options: dict[str, Any] = {"edit": edit, "session": "a"}
    n_steps, said = [], []
    for prepares in (False, True):
        with engine_of(small, n_ctx=2048, n_batch=64, n_ubatch=16, n_seq_max=1) as engine:
            talk = Talk(engine, **options)
            talk.turn(70, 150)
            if prepares:
                talk.prepare()
                engine.step()
                stats = engine.stats()
                # no more than a micro-batch a step; to those who look, nothing runs
                assert (stats.prepared_tokens, stats.n_running, stats.n_waiting) == (16, 0, 0)
                assert engine.look().running == ()
            request = engine.submit(other, brief)
            n_steps.append(0)
            while not engine._loop.stepper._scheduler.running or not request._sequences[0]._n_said:
                engine.step()
                n_steps[-1] += 1
            assert engine.stats().prepared_tokens == 16 * prepares
            said.append(request.result().tokens)
            if prepares:
                run_out(engine)
                talk.turn(1, 5)
                assert talk.n_old[1] == 0
    assert n_steps[0] == n_steps[1]
    assert said[0] == said[1]


def test_a_call_that_needs_a_sequence_waits_for_one_part(small: kvg.Model) -> None:
    with engine_of(small, n_seq_max=1, n_ubatch=16) as engine:
        talk = Talk(engine)
        talk.turn()
        talk.prepare()
        engine.step()
        assert engine.find_prefix(ids_of(small, 20, 8)) == 0
        assert engine.stats().prepared_tokens <= 2 * 16
        assert len(engine.embed(ids_of(small, 20, 8))) == small.n_embd
        run_out(engine)
        assert engine.find_prefix(talk.history) == len(talk.history)


@pytest.mark.parametrize("edit", ["exact", "approximate"])
def test_others_keep_their_cells(small: kvg.Model, edit: Any) -> None:
    """In a full cache, the cells of the old text go for it, as far as nobody else has them."""
    with engine_of(small, n_ctx=640) as engine:
        talk = Talk(engine, edit=edit, session="a")
        talk.turn(60, 150)
        others = [ids_of(small, 90, n) for n in (3, 4, 5)]
        for other in others:
            engine.submit([*other, 9], kvg.SamplingParams(max_tokens=1)).result()
        engine.submit(ids_of(small, 640 - 262 - 3 * 91 - 20, 6), kvg.SamplingParams(max_tokens=1)).result()
        n_free = engine.context.kv.n_free
        assert n_free <= 24  # or there is room without
        talk.prepare()
        run_out(engine)
        assert [engine.find_prefix(other) for other in others] == [90, 90, 90]
        assert engine.find_prefix(talk.spoken) < 64 + 50
        told = talk.turn(1, 5)
        assert talk.n_old[1] == 0
        assert (told.cache.edited > 0) == (edit == "approximate")


def test_without_room_nothing_is_done(model: kvg.Model) -> None:
    with engine_of(model, n_ctx=256) as engine:
        talk = Talk(engine)
        talk.turn(10, 60)
        # its old text is another one: there is nothing to give up
        engine.submit(ids_of(model, 256 - 121 - 20, 6), kvg.SamplingParams(max_tokens=1)).result()
        before = accounts(engine)
        engine.prepare([*talk.history, *ids_of(model, 30, 7)], instead_of=talk.history[:30])
        assert run_out(engine) <= 3
        assert accounts(engine)["nodes"] == before["nodes"]


def test_what_was_evicted_is_not_read_again(small: kvg.Model) -> None:
    """What both texts begin with is gone, as others needed the cells: nobody may come back at all."""
    with engine_of(small, n_ctx=2048) as engine:
        talk = Talk(engine)
        talk.history = ids_of(small, 900, 2)
        talk.turn()
        engine.forget_prefix(talk.spoken)
        before = accounts(engine)
        talk.prepare()
        run_out(engine)
        assert engine.stats().prepared_tokens == 0
        assert accounts(engine) == before


@pytest.mark.parametrize("when", ["to come", "under way", "too late"])
def test_what_is_forgotten_is_not_prepared(small: kvg.Model, when: str) -> None:
    """Nor does the part of it stay that is there already: it is the same conversation."""
    with engine_of(small, n_ctx=1024, n_ubatch=16) as engine:
        talk = Talk(engine)
        talk.turn()
        if when != "too late":
            talk.prepare()
        if when == "under way":
            for _ in range(2):
                engine.step()
            assert 0 < engine.stats().prepared_tokens < N_SAID
        assert engine.forget_prefix(talk.spoken) > 0
        if when == "too late":
            talk.prepare()
        run_out(engine)
        assert engine.stats().cells_used == (0,)


def test_a_request_takes_over_what_is_prepared(model: kvg.Model) -> None:
    """The next turn comes in the midst of it: it goes on from there, and nothing is left to prepare."""
    with engine_of(model, n_ctx=1024, n_ubatch=16) as engine:
        talk = Talk(engine)
        talk.turn(20, 100)
        talk.prepare()
        engine.step()
        engine.step()
        n_prepared = engine.stats().prepared_tokens
        (text,) = engine._loop.stepper._scheduler.running
        n_there = text.n_decoded
        assert 0 < n_prepared <= n_there < len(talk.history)
        told = talk.turn(1, 4)
        assert told.n_cached == n_there
        assert are_likeliest(engine.model, talk.spoken[: -len(told.tokens)], told.tokens)
        run_out(engine)
        assert engine.stats().prepared_tokens == n_prepared


@pytest.mark.parametrize("edit", ["exact", "approximate"])
@pytest.mark.parametrize("site", ["replace", "cells", "build", "alloc", "compute"])
def test_a_fault_ends_it(small: kvg.Model, site: str, edit: Any) -> None:
    """The cells are as before, it isn't tried again, and the next turn says what it says."""
    with engine_of(small, n_ctx=1024) as engine:
        talk = Talk(engine, edit=edit, session="a")
        told = talk.turn(60, 150)
        before = accounts(engine)
        talk.prepare()
        with fault(site):
            engine.step()
            has_failed = engine.stats().prepared_tokens == 0
        assert has_failed or site == "replace"  # of a repair alone
        if has_failed:
            assert run_out(engine) == 1
            assert accounts(engine) == before
        again = engine.submit(talk.spoken, kvg.SamplingParams(max_tokens=2)).result()
        assert are_likeliest(small, talk.spoken, again.tokens)
        assert told.tokens


def test_the_engine_closes_amid_it(small: kvg.Model) -> None:
    with engine_of(small, n_ubatch=16) as engine:
        talk = Talk(engine)
        talk.turn()
        talk.prepare()
        engine.step()
    with pytest.raises(kvg.InvalidArgumentError):
        talk.prepare()


class PreparingSoak(Soak):
    """Between its requests, edits of earlier prompts are prepared in place of these."""

    def submit(self) -> None:
        rng = self.rng
        if rng.random() < 0.6:
            old = rng.choice(self.shared)
            at = rng.randrange(100)
            new = [*old[:at], *old[at + rng.randrange(20) :], *self._ids(rng.randrange(10))]
            edit: Any = rng.choice(["exact", "approximate"])
            self.engine.prepare(new, instead_of=old, edit=edit, session=rng.choice(["", "a"]))
            self.shared[rng.randrange(4)] = new[:150]
            for _ in range(rng.randrange(6)):
                self.engine.step()
                self.check()
        else:
            super().submit()


@pytest.mark.parametrize("overcommit", [False, True])
def test_faults_at_every_place(model: kvg.Model, monkeypatch: pytest.MonkeyPatch, overcommit: bool) -> None:
    """Accounts are exact at every step, whatever fails; every request ends, and nothing is left."""
    monkeypatch.setattr(edits, "REPAIR", 6)
    soak = PreparingSoak(model, 3 + overcommit, overcommit)
    soak.sites = (*SITES, "replace")
    soak.run(1000 if chance.THOROUGH else 60, faults=has_faults())
    assert soak.engine.stats().prepared_tokens > 50
    soak.close()


def test_bad_arguments(small: kvg.Model) -> None:
    with engine_of(small) as engine:
        bad: list[dict[str, Any]] = [{"edit": "some"}, {"session": 5}, {"instead_of": [-1]}, {"salt": 3}]
        for options in bad:
            with pytest.raises(kvg.InvalidArgumentError, match=next(iter(options))):
                engine.prepare([5, 6], **options)
        with pytest.raises(kvg.InvalidArgumentError, match="empty"):
            engine.prepare([])
        with pytest.raises(kvg.CacheFullError, match="513"):
            engine.prepare([5] * 513)
    with engine_of(small, prefix_cache=False) as engine, pytest.raises(kvg.InvalidArgumentError):
        engine.prepare([5, 6])

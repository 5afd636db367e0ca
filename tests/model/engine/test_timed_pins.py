"""Prefixes that are pinned for a time: nobody evicts them before, and never more of them than may be."""

from __future__ import annotations

import random
from array import array

import pytest
from support import chance
from support.engines import ids_of

import pykvgraph as kvg
from pykvgraph.prefix import timed_pins
from pykvgraph.prefix.index import PrefixIndex

READ = kvg.SamplingParams(max_tokens=1)
BLOCK, N_CELLS, N_PINNED = 32, 640, 192


class Clock:
    """A time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timed_pins, "clock", clock)
    return clock


def test_blocks_stay_until_their_time_and_within_the_budget(tiny: kvg.Model, clock: Clock) -> None:
    """Against a dictionary of blocks and times: texts come, are pinned and evicted, and time passes."""
    rng = random.Random(chance.seed("pins"))
    pieces = [[token] * n for token in (1, 2) for n in (20, 32, 44)]
    with kvg.Context(tiny, n_ctx=N_CELLS, n_batch=256, n_seq_max=1) as ctx:
        index = PrefixIndex(ctx.kv, n_pinned=N_PINNED)
        until: dict[tuple[int, ...], float] = {}
        n_over = 0
        for _ in range(3000 // chance.SHARE):
            until = {block: time for block, time in until.items() if time > clock.now}
            ids = [token for piece in rng.choices(pieces, k=rng.randrange(1, 5)) for token in piece]
            tokens, seconds, n = array("i", ids), rng.choice([5.0, 60.0]), rng.randrange(1, len(ids) + 1)
            assert index.make_room(len(ids))
            last = index.attach(index.find(tokens, len(ids) - 1), 0)
            begin = ctx.kv.seq_pos_max(0) + 1
            batch = kvg.Batch()
            batch.extend(ids[begin:], begin)
            ctx.decode(batch)
            last = index.extend(last, tokens, len(ids), 0, to_end=True)
            if rng.random() < 0.6:
                found, wanted = index.pin_for(last, tokens, n, seconds), 0
                for end in range(BLOCK, n + 1, BLOCK):
                    block = tuple(ids[:end])
                    if block not in until and BLOCK * (len(until) + 1) > N_PINNED:
                        n_over += 1
                        break
                    until[block] = max(until.get(block, 0.0), clock.now + seconds)
                    wanted = end
                assert found == wanted
            index.unpin(last)
            ctx.kv.seq_rm(0, -1, -1)
            while rng.random() < 0.8:
                index.evict()
            clock.now += rng.choice([0.0, 1.0, 10.0])
            for known, time in until.items():
                assert time <= clock.now or index.match(array("i", known)).n == len(known)
            assert index.n_pinned <= N_PINNED
        assert n_over, "the budget was never spent"
        index.clear()
        assert ctx.kv.n_used == BLOCK * sum(time > clock.now for time in until.values()) == index.n_pinned
        clock.now += 61.0
        index.clear()
        assert ctx.kv.n_used == index.n_nodes == index.n_pinned == 0


@pytest.mark.parametrize("pins", [(), (kvg.Pin(200, 300.0),)])
def test_a_pinned_prompt_outlives_others(model: kvg.Model, clock: Clock, pins: tuple[kvg.Pin, ...]) -> None:
    """Under a load that evicts it, were it not pinned, and does so when its time has passed."""
    prompt = ids_of(model, 200, 1)
    again = [*prompt[:195], *ids_of(model, 9, 2)]
    n_load = 10

    def load(engine: kvg.Engine) -> None:
        nonlocal n_load
        n_load += 10
        for n in range(n_load, n_load + 10):
            engine.submit(ids_of(model, 150, n), READ).result(60)

    with kvg.Engine(model, n_ctx=768, n_seq_max=2, pin_cells=192) as engine:
        first = engine.submit(prompt, READ, pins=pins).result(60)
        n_pinned = 192 if pins else 0
        assert (first.pinned, engine.stats().n_pinned) == ((192,) if pins else (), n_pinned)
        clock.now += 299.0
        load(engine)
        assert engine.submit(again, READ).result(60).n_cached >= n_pinned
        load(engine)
        clock.now += 2.0
        load(engine)
        assert engine.submit(again, READ).result(60).n_cached < 192
        assert engine.stats().n_pinned == 0


def test_who_forgets_a_prompt_whose_time_has_passed(small: kvg.Model, clock: Clock) -> None:
    """Nobody has needed its cells since then, and so nothing else has found out; so it is with its edits."""
    prompt, behind = ids_of(small, 300, 1), ids_of(small, 40, 2)
    pins, shorter = [kvg.Pin(256, 60.0)], [*prompt[:40], *prompt[60:], *behind]
    with kvg.Engine(small, n_ctx=1024, n_seq_max=2, pin_cells=512) as engine:
        for ids in (prompt, shorter):
            asked = engine.submit(ids, READ, pins=pins, edit="approximate", session="a")
            assert sum(asked.result(60).pinned)
        text = prompt[:300]
        assert engine.forget_prefix(text) < 64  # what is pinned stays
        assert engine.find_prefix(text) >= 256
        clock.now += 61.0
        assert engine.forget_prefix(text) >= 256
        assert sum(engine.stats().cells_used) == 0


def test_no_more_is_pinned_than_may_be(tiny: kvg.Model) -> None:
    prompts = [ids_of(tiny, 100, n) for n in range(3)]
    with kvg.Engine(tiny, n_ctx=1024, n_seq_max=2, pin_cells=160) as engine:
        wanted = (kvg.Pin(40, 60.0), kvg.Pin(100, 60.0))
        found = [engine.submit(prompt, READ, pins=wanted).result(60).pinned for prompt in prompts]
        assert found == [(32, 96), (32, 64), (0, 0)]
        assert engine.stats().n_pinned == 160
        assert engine.submit(prompts[0], READ, pins=wanted).result(60).pinned == (32, 96)
    with kvg.Engine(tiny, n_ctx=1024, n_seq_max=2, pin_cells=0) as engine:
        assert engine.submit(prompts[0], READ, pins=wanted).result(60).pinned == (0, 0)
    with kvg.Engine(tiny, n_ctx=256, n_seq_max=2) as engine:
        assert engine.submit(prompts[0], READ, pins=wanted).result(60).pinned == (32, 64)


def test_cells_without_a_place_to_go_on_from_are_not_pinned(model: kvg.Model) -> None:
    """Two of four resume points may be pinned: the third text would keep cells that nobody could use."""
    with kvg.Engine(model, n_ctx=512, n_seq_max=1, pin_cells=300) as engine:
        needs_points = engine._loop.stepper._running_set.needs_points
        found = list[int]()
        for n in range(3):
            done = engine.submit(ids_of(model, 70, n), READ, pins=[kvg.Pin(64, 60.0)]).result(60)
            found += done.pinned
            assert engine.stats().n_pinned == sum(found)
        assert found == [64, 64, 0 if needs_points else 64]


@pytest.mark.parametrize("overcommit", [True, False])
def test_a_request_that_needs_all_cells_runs(tiny: kvg.Model, overcommit: bool) -> None:
    """Nothing else could: for an hour it would be told that there is no room."""
    pin = kvg.Pin(96, 3600.0)
    with kvg.Engine(tiny, n_ctx=256, n_seq_max=2, pin_cells=128, overcommit=overcommit) as engine:
        assert engine.submit(ids_of(tiny, 100, 1), READ, pins=[pin]).result(60).pinned == (96,)
        beside = engine.submit(ids_of(tiny, 100, 2), kvg.SamplingParams(max_tokens=40)).result(60)
        assert len(beside.tokens) == 40 and engine.stats().n_pinned == 96
        whole = engine.submit(ids_of(tiny, 200, 3), kvg.SamplingParams(max_tokens=57)).result(60)
        assert whole.finish_reason in ("length", "stop")
        assert engine.stats().n_pinned < 96
        assert engine.submit(ids_of(tiny, 100, 1), READ, pins=[pin]).result(60).pinned == (96,)
        assert engine.embed(ids_of(tiny, 250, 4)).shape == (tiny.n_embd,)


def test_what_can_not_be_a_pin_is_refused(tiny: kvg.Model) -> None:
    with kvg.Engine(tiny, n_ctx=256, n_seq_max=1) as engine:
        for pin in (kvg.Pin(0, 1.0), kvg.Pin(9, 1.0), kvg.Pin(4, 0.0), kvg.Pin(4, float("nan")), (4,)):
            with pytest.raises(kvg.InvalidArgumentError, match=r"n_tokens|seconds|pin"):
                engine.submit([1] * 8, READ, pins=[pin])  # type: ignore[list-item]
        with pytest.raises(kvg.InvalidArgumentError, match="pins must be"):
            engine.submit([1] * 8, READ, pins=None)  # type: ignore[arg-type]
        assert engine.stats().n_waiting == 0
    with pytest.raises(kvg.InvalidArgumentError, match="pin_cells"):
        kvg.Engine(tiny, n_ctx=256, pin_cells=-1)

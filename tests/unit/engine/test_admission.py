"""Who may enter, so that the cells never run out: against a walk by hand, and against texts that run."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.naive_engine import NaiveEngine, text

from pykvgraph.engine.admission import Growth, Seen, most_in_use
from pykvgraph.engine.context_window import Window


def alone(*n_cells: int) -> Seen:
    """Each text sees cells that nobody else sees."""
    return Seen(np.eye(len(n_cells), dtype=np.bool_), np.array(n_cells))


def talker(n_left: int) -> Growth:
    return Growth(1, 1, n_left, n_left)


def test_a_walk_by_hand() -> None:
    """20, 30 and 40 cells; 5, 50 and 10 tokens to say. In use with the last token of each:

    step 5: 90 + 15 = 105. Step 10: the first has left 20, and 70 + 20 = 90. Step 50: 30 + 50 = 80.
    """
    growths = [talker(5), talker(50), talker(10)]
    assert most_in_use(growths, alone(20, 30, 40)) == 105
    assert most_in_use([growths[1]], alone(30)) == 80
    # when all of them are shared, nothing is left before the longest ends: 90 + 50
    assert most_in_use(growths, Seen(np.ones((1, 3), np.bool_), np.array([90]))) == 140
    # shared by the short ones: with step 10 it is 60 + 30 + 20, with step 50 30 + 50
    by = np.array([[True, False, True], [False, True, False]])
    assert most_in_use(growths, Seen(by, np.array([60, 30]))) == 110
    # cells that nobody sees make way
    assert most_in_use(growths, Seen(np.zeros((1, 3), np.bool_), np.array([1000]))) == 50


def test_a_window_bounds_what_a_text_has() -> None:
    """Of 30 cells and 50 more, 9 at a time."""
    assert most_in_use([Growth(1, 1, 50, 50, 9)], alone(30)) == 9


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_a_run_to_the_end_uses(seed: int) -> None:
    """Where everybody talks, and says all that it may, not a cell more is asked for."""
    engine = NaiveEngine(10**6, 8, 64, 64, seed=seed)
    rng = engine.rng
    for _ in range(rng.randrange(1, 9)):
        running = engine.scheduler.running
        like = rng.choice(running) if running and rng.random() < 0.6 else None
        n_found = rng.randrange(like.n_decoded + 1) if like else 0
        assert engine.enter(text(n_found + 1, rng.randrange(1, 60)), like, n_found)
        for _ in range(rng.randrange(4)):
            engine.step()
    running = list(engine.scheduler.running)
    if not running or any(each.n_todo != 1 for each in running):
        return
    seq = engine._seq(0)
    seen = Seen(seq[:, [each.seq for each in running]], np.ones(len(seq), np.int64))
    expected = most_in_use([talker(each.n_may_say) for each in running], seen)
    most = 0
    while engine.scheduler.running:
        most = max(most, engine.n_in_use() + len(engine.scheduler.running))
        engine.step()
    assert most == expected


@pytest.mark.parametrize("window", [0, 5, 16])
@pytest.mark.parametrize(("n_seq_max", "n_batch", "least"), [(4, 16, 1), (6, 16, 8), (3, 32, 32), (6, 4, 4)])
def test_who_is_inside_never_runs_out(n_seq_max: int, n_batch: int, least: int, window: int) -> None:
    """Whoever comes, ends early, forks, searches, shifts, drafts, is read or passed over: there are cells."""
    n_ended = n_refused = n_read = 0
    for seed in range(6):
        engine = NaiveEngine(96, n_seq_max, n_batch, least, window, seed)
        engine.drafts = seed >= 3
        rng, running = engine.rng, engine.scheduler.running
        for _ in range(120):
            if rng.random() < 0.7:
                like = rng.choice(running) if running and rng.random() < 0.5 else None
                n_found = rng.randrange(min(like.n_decoded, 40) + 1) if like else 0
                n_prompt = n_found + rng.randrange(1, 20)
                n = rng.choice([1, 1, 2, 3])
                shifts = n == 1 and not window and rng.random() < 0.3
                new = text(
                    n_prompt,
                    rng.choice([1, 2, 5, rng.randrange(1, 60)]),
                    n,
                    Window(max(n_prompt + 1, rng.randrange(8, 60)), rng.randrange(9)) if shifts else None,
                )
                if n > 1 and rng.random() < 0.7:
                    new = engine.beams(n_prompt, new.n_may_say, n)
                if new.most_cells <= 96:
                    n_refused += not engine.enter(new, like, n_found)
            if rng.random() < 0.2:
                n_read += engine.begin_reading(rng.randrange(1, 90))
            n_ended += len(engine.step())
            if running and rng.random() < 0.1:
                engine.leave(rng.choice(running))
    assert n_ended > 30
    assert n_refused > 30
    assert n_read > 10


@pytest.mark.parametrize(("least", "spacing"), [(1, 0), (7, 64), (64, 64), (100, 0)])
def test_how_long_prompts_are_read(least: int, spacing: int) -> None:
    """Texts that come make the others stop where they part, a block from all stops that are known."""
    engine = NaiveEngine(10**6, 8, 128, least, window=16)
    engine.n_most = least
    rng, running = engine.rng, engine.scheduler.running
    n_most = 200 if least == 1 else 1500
    for seed in range(3):
        rng.seed(seed)
        for _ in range(6):
            assert engine.enter(text(rng.randrange(2, n_most), 10_000))
            running[-1].spacing = spacing
            for place in (512, 1024, running[-1].n_prompt - 1, rng.randrange(1500)):
                running[-1].add_place(place)
        n_steps = engine.admission._steps_to_read(running, [each.n_todo for each in running])
        while any(not each.decodes for each in running):
            for each in running:
                place = rng.randrange(each.n_decoded, each.n_decoded + 100)
                if not each.decodes and all(abs(place - n) >= 32 for n in (each.n_decoded, *each.places)):
                    each.add_place(place)
            engine.step()
            n_steps -= 1
        assert n_steps >= 0
        for each in list(running):
            engine.leave(each)


def test_every_order_of_a_few_texts() -> None:
    """All triples of small texts, in all orders, one a step or all at once: nobody lacks a cell, all end."""
    kinds = [(1, 1, 1), (1, 9, 1), (3, 4, 1), (6, 2, 1), (8, 1, 1), (1, 4, 2), (2, 3, 3)]  # the last: beams
    for texts in itertools.product(kinds, repeat=3):
        for gap in (0, 2):
            engine = NaiveEngine(12, 9, 9, 4)
            waiting = [engine.beams(*each) if each[2] > 1 else text(*each) for each in texts]
            n_ended = 0
            for step in range(100):
                while waiting and step >= gap * (3 - len(waiting)) and engine.enter(waiting[0]):
                    waiting.pop(0)
                n_ended += len(engine.step())
                if n_ended == 3:
                    break
            assert n_ended == 3


def test_a_short_text_enters_where_the_sum_would_not_fit() -> None:
    """100 cells. One may become 90 long and has 80 to go; short ones fit before it has grown: 10 + 12."""
    engine = NaiveEngine(100, 4, 64, 64)
    assert engine.enter(text(10, 81))
    engine.step()
    assert engine.enter(text(4, 9))
    assert engine.enter(text(4, 9))
    assert not engine.enter(text(4, 60))


def test_where_some_are_passed_over_the_sum_counts() -> None:
    """Two at a time of three: nobody can tell when the short ones have ended."""
    engine = NaiveEngine(100, 4, 2, 2)
    assert engine.enter(text(10, 81))
    assert engine.enter(text(1, 5))
    assert not engine.enter(text(1, 6))
    assert engine.enter(text(1, 5))

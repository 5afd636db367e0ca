"""Who runs, and what a step decodes of whom: the queues of the engine, without a cache."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from support import chance

from pykvgraph.engine.request import Request
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.scheduler import Scheduler
from pykvgraph.engine.token_budget import TokenBudget
from pykvgraph.params.params import SamplingParams


def sequence(n_prompt: int, priority: int = 0) -> RequestSequence:
    request = Request(1, lambda _: None)
    params = SamplingParams(max_tokens=8, priority=priority)
    return RequestSequence(request, 0, np.arange(n_prompt, dtype=np.int32), params, None, b"")


def entered(scheduler: Scheduler, *sequences: RequestSequence) -> None:
    for each in sequences:
        scheduler.arrive(each)
        scheduler.enter(each)


def decode(scheduler: Scheduler, n_prompt_tokens: int = 1000) -> list[tuple[int, int]]:
    """One step; the sequence and the tokens of each chunk. Whoever reaches its end says a token."""
    chunks = scheduler.chunks(n_prompt_tokens)
    scheduler.count_idle(chunks)
    for chunk in chunks:
        chunk.sequence.n_decoded += chunk.n
        if chunk.ends:
            chunk.sequence.ids.append(1)
    return [(chunk.sequence.seq, chunk.n) for chunk in chunks]


def test_who_talks_comes_first_then_the_prompt_of_which_least_is_left() -> None:
    scheduler = Scheduler(4, 32)
    first, second, third = sequence(1), sequence(20), sequence(50)
    entered(scheduler, first, third, second)
    assert decode(scheduler) == [(first.seq, 1), (second.seq, 20), (third.seq, 11)]
    assert decode(scheduler) == [(first.seq, 1), (second.seq, 1), (third.seq, 30)]
    assert decode(scheduler) == [(first.seq, 1), (second.seq, 1), (third.seq, 9)]


def test_waiting_texts_are_in_order_of_priority_then_of_arrival() -> None:
    scheduler = Scheduler(4, 32)
    low, high, later = sequence(1), sequence(1, priority=2), sequence(1, priority=2)
    for each in (low, high, later):
        scheduler.arrive(each)
    assert list(scheduler.waiting) == scheduler.waiting.first() == [high, later, low]


def test_a_text_that_was_set_aside_comes_back_before_later_ones() -> None:
    scheduler = Scheduler(2, 32)
    first, second, third = sequence(1), sequence(1), sequence(1)
    entered(scheduler, first, second)
    scheduler.arrive(third)
    assert scheduler.youngest() is second
    scheduler.leave(second)
    scheduler.wait(second)
    assert list(scheduler.waiting) == [second, third]
    assert scheduler.n_free_seqs == 1


def test_nobody_is_passed_over_for_longer_than_there_are_sequences() -> None:
    """A prompt of 500 tokens takes all the room there is; a longer one still gets its turn."""
    scheduler = Scheduler(4, 16)
    long, short = sequence(10_000), sequence(500)
    entered(scheduler, long, short)
    gaps, gap = [], 0
    while short.n_todo > 1:
        gap = 0 if any(seq == long.seq for seq, _ in decode(scheduler)) else gap + 1
        gaps.append(gap)
    assert 0 < max(gaps) <= 4


def test_more_talkers_than_a_batch_has_room_for_take_turns() -> None:
    scheduler = Scheduler(6, 4)
    talkers = [sequence(1) for _ in range(6)]
    entered(scheduler, *talkers)
    steps = [{seq for seq, _ in decode(scheduler)} for _ in range(20)]
    assert {len(step) for step in steps} == {4}
    for before, after in itertools.pairwise(steps):
        assert before | after == {each.seq for each in talkers}


def test_a_chunk_ends_where_a_resume_point_is_to_be_kept() -> None:
    scheduler = Scheduler(1, 32)
    text = sequence(70)
    for place in (40, 50, 40, 0, 70):
        text.add_place(place)
    entered(scheduler, text)
    assert [decode(scheduler)[0][1] for _ in range(4)] == [32, 8, 10, 20]


def test_forks_run_in_sequences_that_were_kept_for_them() -> None:
    scheduler = Scheduler(3, 32)
    text, forks = sequence(5), [sequence(5), sequence(5)]
    text.forks = list(forks)
    assert text.most_cells == 5 + 3 * 7
    entered(scheduler, text)
    assert scheduler.n_free_seqs == 0
    assert scheduler.fork(text) == forks
    assert {each.seq for each in (text, *forks)} == {0, 1, 2}
    for each in (*forks, text):
        scheduler.leave(each)
    assert scheduler.n_free_seqs == 3


def test_pace_keeps_a_step_within_its_limit() -> None:
    """Steps take 10 ms, and 1 ms more for each token of a prompt; the limit is 40 ms."""
    budget = TokenBudget(0.040, 64, 16)
    assert budget.n_prompt_tokens(0, 512) == 512  # nobody waits for a token
    for _ in range(50):
        n = budget.n_prompt_tokens(8, 512)
        budget.learn(8, n, 0.010 + 0.001 * n)
        budget.learn(8, 0, 0.010)
    assert 15 <= budget.n_prompt_tokens(8, 512) <= 30
    assert 0.010 + 0.001 * budget.n_prompt_tokens(8, 512) <= 0.040
    for _ in range(50):  # the machine has become slower
        budget.learn(8, 1, 0.1)
        budget.learn(8, 0, 0.09)
    assert budget.n_prompt_tokens(8, 512) == 1  # a prompt never stands still


@pytest.mark.parametrize(("base", "each", "n"), [(0.01, 0.001, 64), (0.08, 0.004, 42), (0.3, 0.08, 16)])
def test_pace_without_a_limit(base: float, each: float, n: int) -> None:
    """64 tokens where there is time for them in a quarter of a second, and 16 at least. No step differs."""
    budget = TokenBudget(None, 64, 16)
    assert budget.n_prompt_tokens(8, 512) == 64
    for _ in range(200):
        n_now = budget.n_prompt_tokens(8, 512)
        budget.learn(8, n_now, base + n_now * each)
        budget.learn(8, 0, base)
    assert budget.n_prompt_tokens(8, 512) == pytest.approx(n, abs=1)
    assert budget.n_prompt_tokens(0, 512) == 512 and budget.n_prompt_tokens(8, 5) == 5


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_pace_keeps_nineteen_of_twenty_steps_within_its_limit(noise: float) -> None:
    """A prompt of 20,000 tokens: one more takes 2 ms, and 0.4 us more for each before it; steps differ."""
    rng = random.Random(chance.seed(1))

    def lasts(n_tokens: int, depth: int) -> float:
        expected = 0.030 + n_tokens * (0.002 + 4e-7 * depth)
        return expected * rng.lognormvariate(0, noise) * (rng.uniform(1.3, 2) if rng.random() < 0.02 else 1)

    alone = sorted(lasts(0, 0) for _ in range(500))
    limit = 2 * alone[475]
    budget = TokenBudget(limit, 64, 16)
    for each in alone:
        budget.learn(8, 0, each)
    depth, took = 0, []
    while depth < 20_000:
        n = min(budget.n_prompt_tokens(8, 512), 512 - depth % 512)  # a step ends where a resume point is made
        took.append(lasts(n, depth))
        budget.learn(8, n, took[-1])
        depth += n
    assert sum(each > limit for each in took) <= 0.05 * len(took)
    assert sum(took) / len(took) >= 0.4 * limit  # and the prompt gets the room that there is

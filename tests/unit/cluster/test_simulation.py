"""Simulated workers against times worked out by hand, and the real router before them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from pykvgraph.cluster.prefixes import TOKEN_BYTES, Block
from pykvgraph.cluster.simulation.caches import Caches
from pykvgraph.cluster.simulation.machine import CHUNK, Machine, Text
from pykvgraph.cluster.simulation.simulation import POLICIES, simulate
from pykvgraph.cluster.simulation.traffic import N_TURNS, Asked, Traffic
from pykvgraph.plan.time_model import StepLine, TimeModel

# a step takes a second and a hundredth of one for each token; cells cost nothing
PLAIN = TimeModel(StepLine(1.0, 0.01, 0.0), StepLine(1.0, 0.01, 0.0))
# about those of 219 M parameters on two CPU cores
SMALL = TimeModel(StepLine(0.0075, 0.0007, 6e-7), StepLine(0.0067, 0.0007, 6e-7))


class Plain(Machine):
    def n_cached(self, text: Text) -> int:
        return 10 if text.asked.n_prompt == 11 else 0


def text(n_prompt: int, n_answer: int, came: float = 0.0) -> Text:
    return Text(Asked((), (), n_prompt, n_answer), came)


def run(machine: Machine, comes: list[Text]) -> dict[Text, float]:
    """When each is answered."""
    found: dict[Text, float] = {}
    comes = sorted(comes, key=lambda each: each.came)
    while comes or machine.end() < math.inf:
        if comes and comes[0].came <= machine.end():
            machine.enter(comes[0], comes.pop(0).came)
            continue
        now = machine.end()
        _, answered = machine.step()
        found |= dict.fromkeys(answered, now)
    return found


def test_one_text() -> None:
    """Two chunks of the prompt and its rest; the last one gives a token; four steps for the others."""
    machine, one = Plain(PLAIN, 4), text(2 * CHUNK + 7, 5, 3.0)
    found = run(machine, [one])
    first = 3.0 + 2 * (1 + 0.01 * CHUNK) + 1.07
    assert one.first == pytest.approx(first)
    assert found[one] == pytest.approx(first + 4 * 1.01)
    assert machine.seconds_busy == pytest.approx(found[one] - 3.0)


def test_texts_share_steps() -> None:
    """A second one comes amid a step, waits for its end, and is read beside the first one's answer."""
    machine, one, two = Plain(PLAIN, 4), text(1, 10), text(20, 3, 2.5)
    found = run(machine, [one, two])
    # steps of the first: 1.01 each; the third ends at 3.03, and then one has 21 tokens
    assert two.first == pytest.approx(3.03 + 1.21)
    assert found[two] == pytest.approx(3.03 + 1.21 + 2 * 1.02)
    assert found[one] == pytest.approx(3.03 + 1.21 + 2 * 1.02 + 4 * 1.01)


def test_two_come_in_one_step() -> None:
    """The second when the plan begins in the future, with shorter steps than the one that is not over yet."""
    machine = Plain(PLAIN, 4)
    one, two, three = text(10 * CHUNK, 2), text(1, 3, 0.02), text(1, 3, 0.03)
    found = run(machine, [one, two, three])
    first = 1 + 0.01 * CHUNK
    assert two.first == pytest.approx(first + 1.01)
    assert three.first == pytest.approx(first + 1.01 + 1.02)
    assert found[two] == pytest.approx(first + 1.01 + 1.02 + (1.01 + 0.01 * CHUNK) + 0.01)
    machine, slow = Plain(TimeModel(StepLine(0.0, 0.01, 0.0), StepLine(0.0, 0.01, 0.0)), 4), text(CHUNK, 9)
    others = [text(1, 9, 0.01 * i) for i in range(1, 4)]
    found = run(machine, [slow, *others])
    assert len(found) == 4 and all(each.n_said == 9 for each in found)


def test_no_free_slot_and_the_shortest_prompt_first() -> None:
    machine, one = Plain(PLAIN, 1), text(1, 3)
    two = text(5, 1, 0.5)
    found = run(machine, [one, two])
    assert found[one] == pytest.approx(3.03)
    assert two.first == found[two] == pytest.approx(3.03 + 1.05)
    machine, long, short = Plain(PLAIN, 2), text(3 * CHUNK, 1), text(4, 1, 0.1)
    found = run(machine, [long, short])
    assert found[short] < found[long]


def test_what_the_cache_has_is_not_read() -> None:
    machine, one = Plain(PLAIN, 1), text(11, 1)
    assert run(machine, [one])[one] == pytest.approx(1.01)
    assert one.n_cached == 10


def test_caches_are_as_large_as_they_are() -> None:
    caches = Caches()
    caches.begin(0, 10)
    first = (Block(b"a", 5 * TOKEN_BYTES), Block(b"b", 8 * TOKEN_BYTES))
    caches.remember(0, first)
    assert caches.n_cached(0, first) == 0  # asked, not decoded
    caches.store(0, first)
    assert caches.n_cached(0, first) == 8
    caches.store(0, (Block(b"c", 4 * TOKEN_BYTES),))
    assert caches.n_cached(0, first) == 5


def test_talks_go_on_where_they_were() -> None:
    turns = [
        asked for _, asked in zip(range(200), (asked for _, asked in Traffic(1).person(3)), strict=False)
    ]
    n_talks = 1
    for before, asked in pairwise(turns):
        if asked.blocks[: len(before.after)] != before.after:
            n_talks += 1
            assert not set(asked.blocks[-1:]) & set(before.after)
    assert len(turns) / N_TURNS[1] <= n_talks < len(turns)
    assert [asked for _, asked in zip(range(9), Traffic(1).person(3), strict=False)] == [
        asked for _, asked in zip(range(9), Traffic(1).person(3), strict=False)
    ]


def test_the_router_finds_what_a_central_index_finds() -> None:
    """At least 90 % of it, with 20 workers; by load alone it is less than half."""
    found = {policy: simulate(SMALL, 20, 7, policy, 2000) for policy in POLICIES}
    assert found["router"].hits >= 0.9 * found["index"].hits
    assert found["load"].hits < 0.5 * found["index"].hits
    assert 0.5 < found["router"].busy < 1
    for outcome in found.values():
        assert len(outcome.first) == 2000 - 2000 // 4
        assert min(outcome.first) > 0

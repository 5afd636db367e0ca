"""Simulated workers against times worked out by hand, and the real router before them."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from pykvgraph.bench.cluster_simulation import simulation
from pykvgraph.bench.cluster_simulation.caches import Caches
from pykvgraph.bench.cluster_simulation.costs import Costs
from pykvgraph.bench.cluster_simulation.machine import CHUNK, Machine, SimulatedText
from pykvgraph.bench.cluster_simulation.simulation import POLICIES, simulate
from pykvgraph.bench.cluster_simulation.traffic import (
    N_TURNS,
    SimulatedPart,
    SimulatedRequest,
    Traffic,
    part_of,
)
from pykvgraph.cluster.prefixes import TOKEN_BYTES
from pykvgraph.plan.time_model import StepLine, TimeModel
from pykvgraph.stream.split import Roles

# a step takes a second and a hundredth of one for each token; cells cost nothing
PLAIN = TimeModel(StepLine(1.0, 0.01, 0.0), StepLine(1.0, 0.01, 0.0))
# about those of 219 M parameters on two CPU cores
SMALL = Costs(TimeModel(StepLine(0.0075, 0.0007, 6e-7), StepLine(0.0067, 0.0007, 6e-7)), 16 << 10)


class Plain(Machine):
    def cached(self, text: SimulatedText) -> tuple[int, float]:
        return {11: (10, 0.0), 12: (9, 0.5)}.get(text.n_prompt, (0, 0.0))


def text(n_prompt: int, n_answer: int, came: float = 0.0) -> SimulatedText:
    return SimulatedText(said(n_prompt, n_answer), came, n_prompt, n_answer)


def said(n_prompt: int, n_answer: int = 1, talk: int = 1) -> SimulatedRequest:
    """Under an instruction of one token."""
    return SimulatedRequest((), SimulatedPart(0, 1), SimulatedPart(talk, n_prompt - 1), n_answer)


def run(machine: Machine, comes: list[SimulatedText]) -> dict[SimulatedText, float]:
    """When each is answered."""
    found: dict[SimulatedText, float] = {}
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


def test_loading_stops_all() -> None:
    """A text of which 9 tokens are loaded in half a second comes while another one talks."""
    machine, one, two = Plain(PLAIN, 2), text(1, 5), text(12, 1, 1.5)
    found = run(machine, [one, two])
    # one's steps end at 1.01 and 2.02; then it is loaded, and 3 tokens are read in a step with one's next
    assert two.first == found[two] == pytest.approx(2.02 + 0.5 + 1.04)
    assert two.n_cached == 9
    assert found[one] == pytest.approx(2.02 + 0.5 + 1.04 + 2 * 1.01)
    assert one.gap == pytest.approx(1.54)
    assert one.token_seconds == pytest.approx((found[one] - 1.01) / 4)
    assert machine.seconds_busy == pytest.approx(found[one])


def test_caches_are_as_large_as_they_are() -> None:
    """What was used longest ago goes first, of a text its end; an instruction is as new as its last talk."""
    caches = Caches(10)
    caches.store(0, said(5))
    caches.store(0, said(5), 3)
    assert caches.n_cached(0, said(9)) == 8 and caches.n_cached(1, said(9)) == 0
    caches.store(0, said(5, talk=2))
    assert caches.n_cached(0, said(9)) == 6 and caches.n_cached(0, said(9, talk=2)) == 5
    caches.store(0, said(30, talk=3))
    assert caches.n_cached(0, said(9)) == 1 and caches.n_cached(0, said(30, talk=3)) == 10


def test_who_has_a_block() -> None:
    _, asked = next(Traffic(1).person(3))
    caches = Caches(1 << 20)
    caches.store(7, asked)
    caches.store(8, SimulatedRequest((), asked.instruction, SimulatedPart(1 << 20, 5), 1))
    of_instruction = [part_of(block).number == asked.instruction.number for block in asked.blocks]
    assert True in of_instruction and False in of_instruction
    for block, is_shared in zip(asked.blocks, of_instruction, strict=True):
        assert sorted(caches.holders(block)) == ([7, 8] if is_shared else [7])
        assert (8 in caches.holders(block)) == is_shared and 7 in caches.holders(block)
    assert not list(Caches(1).holders(asked.blocks[0]))


def test_costs() -> None:
    """1,638,400 bytes at 0.8 GB/s, and at 10 Gbit/s."""
    assert SMALL.loading(100) == pytest.approx(2.048e-3)
    assert SMALL.sending(100) == pytest.approx(1.31072e-3)


def test_talks_go_on_where_they_were() -> None:
    turns = [asked for _, (_, asked) in zip(range(200), Traffic(1).person(3), strict=False)]
    n_talks = 1
    for before, asked in pairwise(turns):
        assert asked.blocks[-1].end == asked.n_prompt * TOKEN_BYTES
        if asked.talk.number == before.talk.number:
            assert asked.blocks[: len(before.blocks)] == before.blocks
            assert asked.n_prompt > before.n_prompt + before.n_answer
        else:
            n_talks += 1
            assert not set(asked.blocks[-1:]) & set(before.blocks)
    assert len(turns) / N_TURNS[1] <= n_talks < len(turns)
    again = [asked for _, (_, asked) in zip(range(200), Traffic(1).person(3), strict=False)]
    assert again == turns


def test_what_routing_and_tiers_do() -> None:
    """With 20 workers, at least 90 % of what a central index finds; by load alone it is less than half."""
    found = {policy: simulate(SMALL, 20, 7, policy, 2000) for policy in POLICIES}
    assert found["router"].hits >= 0.9 * found["index"].hits
    assert found["load"].hits < 0.5 * found["index"].hits
    assert found["tiers"].hits > 1.05 * found["router"].hits
    assert 0.5 < found["router"].busy < 1
    for policy, outcome in found.items():
        assert len(outcome.first) == len(outcome.token) == len(outcome.gap) == 2000 - 2000 // 2
        assert min(outcome.first) > 0 and min(outcome.token) > 0
        assert (0 < outcome.n_readers < 20) == (policy == "roles")


def test_readers_read_for_the_others_and_delay_nobody() -> None:
    tiers, roles = (simulate(SMALL, 20, 3, policy, 2000) for policy in ("tiers", "roles"))
    assert roles.n_readers > 0
    medians = [statistics.median(outcome.first) for outcome in (tiers, roles)]
    assert medians[1] < 1.5 * medians[0]
    assert statistics.fmean(roles.token) < statistics.fmean(tiers.token)  # fewer steps have prompts in them


def test_caches_are_warm_at_the_beginning() -> None:
    run = simulation._Simulation(SMALL, Roles(0, 10), 6, "router")
    run.run(200)
    assert sum(each.n_cached for each in run._done) > 0.6 * sum(each.n_prompt for each in run._done)

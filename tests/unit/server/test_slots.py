"""The server's slots beside a list of who waits, of whom each is looked at whenever a slot is free."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvgraph.openai.sample import Sample
from pykvgraph.server import slots as slots_module
from pykvgraph.server.slots import Slots

N, FIRST = 3, 4


def sample(wanted: int = -1) -> Sample:
    return Sample(index=0, prompt=[1], n_predict=1, settings={}, wanted_slot=wanted)


class Naive:
    def __init__(self) -> None:
        self.has: dict[int, Sample | None] = dict.fromkeys(range(FIRST, FIRST + N))
        self.waiting: list[Sample] = []

    def enter(self, sample: Sample) -> None:
        self.waiting.append(sample)
        self.give()

    def leave(self, sample: Sample) -> None:
        self.waiting = [each for each in self.waiting if each is not sample]
        for slot, each in self.has.items():
            if each is sample:
                self.has[slot] = None
        self.give()

    def give(self) -> None:
        for sample in list(self.waiting):
            free = [slot for slot, each in self.has.items() if each is None]
            fits = [slot for slot in free if sample.wanted_slot in (-1, slot)]
            if fits:
                self.has[min(fits)] = sample
                self.waiting = [each for each in self.waiting if each is not sample]


# who comes, and which slot it wants; or who of those that are there leaves
steps = st.lists(st.one_of(st.sampled_from([-1, -1, *range(FIRST, FIRST + N)]), st.integers(100, 200)))


@settings(max_examples=300, deadline=None)
@given(steps)
def test_as_a_list_that_is_walked_through(steps: list[int]) -> None:
    slots, naive, there = Slots(N, False, FIRST), Naive(), list[Sample]()
    for step in steps:
        if step < 100:
            new = sample(step)
            there.append(new)
            slots.enter(new)
            naive.enter(new)
        elif there:
            gone = there.pop(step % len(there))
            slots.leave(gone)
            slots.leave(gone)  # a second time is nothing
            naive.leave(gone)
        having = [(each.slot, each) for each in there if each.slot >= 0]
        assert {slot: each for slot, each in naive.has.items() if each} == dict(having)
        assert slots.n_processing == len(having)
        assert slots.n_deferred == len(naive.waiting)
        told = {each["id"]: each["is_processing"] for each in slots.told(64)}
        assert told == {slot: each is not None for slot, each in naive.has.items()}


def test_who_wants_a_slot_waits_for_it_while_later_ones_take_others() -> None:
    slots = Slots(2, False)
    first, second, wants, later, last = sample(), sample(), sample(1), sample(), sample()
    for each in (first, second, wants, later, last):
        slots.enter(each)
    slots.leave(first)
    assert (wants.slot, later.slot, last.slot) == (-1, 0, -1)
    slots.leave(second)
    assert (wants.slot, last.slot) == (1, -1)
    slots.leave(later)
    assert last.slot == 0


def test_what_a_slot_had_is_told_when_it_is_free() -> None:
    async def main() -> None:
        slots, one = Slots(1, False), sample()
        slots.enter(one)
        text = asyncio.ensure_future(slots.text(0))
        await asyncio.sleep(0)
        assert not text.done()
        slots.leave(one)
        assert (await text).ids == [1]

    asyncio.run(main())


class Walked(OrderedDict[int, Any]):
    """Counts who is looked at."""

    n = 0

    def __iter__(self) -> Any:
        for each in super().__iter__():
            Walked.n += 1
            yield each

    def values(self) -> Any:
        Walked.n += len(self)
        return super().values()


def test_nobody_looks_at_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 come, and leave: each time at most the first of a queue is looked at."""
    monkeypatch.setattr(slots_module, "OrderedDict", Walked)
    slots, n = Slots(2, False), 5000
    samples = [sample(-1 if i % 3 else i % 2) for i in range(n)]
    Walked.n = 0
    for each in samples:
        slots.enter(each)
    for each in samples[n // 2 :]:  # who still waits
        slots.leave(each)
    for each in samples[: n // 2]:  # who was given a slot meanwhile, or has waited
        slots.leave(each)
    assert (slots.n_processing, slots.n_deferred) == (0, 0)
    assert Walked.n <= 4 * n


def test_the_free_slot_that_was_had_longest_ago() -> None:
    slots, had = Slots(N, False, FIRST), [sample(FIRST + n) for n in range(N)]
    assert slots.longest_free(FIRST) == FIRST + 1  # nobody ever had it
    for each in (had[1], had[0]):
        slots.enter(each)
        slots.leave(each)
    assert slots.longest_free(FIRST) == FIRST + 2
    slots.enter(had[2])
    assert [slots.longest_free(but) for but in (FIRST, FIRST + 1, FIRST + 2)] == [FIRST + 1, FIRST, FIRST + 1]
    for each in had[:2]:
        slots.enter(each)
    assert slots.longest_free(FIRST) == -1

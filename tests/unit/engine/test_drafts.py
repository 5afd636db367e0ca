"""What drafts are made of, and how long they are: n-grams, rates, seconds, without a model."""

from __future__ import annotations

import random
from array import array

import pytest

from pykvgraph.engine.speculation.gate import Acceptance, Gate
from pykvgraph.engine.speculation.lookup import Lookup
from pykvgraph.engine.step_seconds import Seconds, StepSeconds


def longest(ids: list[int]) -> int:
    """The most last tokens that came before, of all places; naive."""
    n = len(ids)
    best = 0
    for at in range(1, n):
        same = 0
        while same < at and ids[at - 1 - same] == ids[n - 1 - same]:
            same += 1
        best = max(best, same)
    return best


@pytest.mark.parametrize("n_tokens", [2, 3, 5])
def test_a_guess_follows_the_longest_run_that_came_before(n_tokens: int) -> None:
    """Texts that grow by a few tokens at a time; a run of one token is none."""
    rng = random.Random(n_tokens)
    lookup, ids = Lookup(), array("i")
    for _ in range(60):
        ids.extend(rng.randrange(n_tokens) for _ in range(rng.randrange(1, 4)))
        guess = lookup.guess(ids, 5)
        text = ids.tolist()
        most = longest(text)
        if most < 2:
            assert not guess.tokens
            continue
        assert len(guess.tokens) == 5
        tail = text[-min(guess.n_same, len(text)) :]
        runs = [text[at - len(tail) : at] for at in range(len(tail), len(text))]
        places = [at for at, run in enumerate(runs, len(tail)) if run == tail]
        extended = [(text[at:] + (text[at:] * 5))[:5] for at in places]
        assert guess.tokens.tolist() in extended
        if len(text) < 12:  # among the newest eight places is every one
            assert guess.n_same == most


def test_a_guess_goes_on_where_the_last_one_held() -> None:
    lookup = Lookup()
    ids = array("i", [1, 2, 3, 4, 5, 6, 7, 1, 2])
    assert lookup.guess(ids, 3).tokens.tolist() == [3, 4, 5]
    ids.extend([3, 4])
    assert lookup.guess(ids, 3).tokens.tolist() == [5, 6, 7]
    assert lookup.last_guess(len(ids)).n_same == 4
    assert not lookup.last_guess(len(ids) - 1).tokens
    ids.append(1)
    assert not lookup.guess(ids, 3).tokens
    ids.append(2)
    assert lookup.guess(ids, 2).tokens.tolist() == [3, 4]


def test_a_guess_of_a_text_that_turns_in_a_circle() -> None:
    assert Lookup().guess(array("i", [9, 1, 2, 1, 2]), 7).tokens.tolist() == [1, 2, 1, 2, 1, 2, 1]


def test_rates_are_apart_for_short_and_for_long_runs() -> None:
    record = Acceptance()
    for _ in range(100):
        record.learn(2, 4, 0)
        record.learn(9, 4, 4)
    assert record.rate(2) == record.rate(3) < 0.05
    assert record.rate(4) == 0.5
    assert record.rate(8) == record.rate(30) > 0.95


def test_seconds_between_those_that_were_measured_are_on_a_line() -> None:
    seconds = StepSeconds()
    assert seconds.of(3) == 0.0
    learn(seconds, 1, 9.0, 1.0)
    assert seconds.of(1) == 1.0
    assert 1.0 < seconds.of(2) < seconds.of(9)
    learn(seconds, 5, 9.0, 3.0)
    assert [seconds.of(n) for n in (1, 2, 3, 5, 7)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0])
    learn(seconds, 5, 3.0, 3.0)
    seconds.learn(5, 30.0)  # something else ran meanwhile: it counts as a quarter more
    assert seconds.of(5) == pytest.approx(3.0 + 0.2 * 0.75)


def learn(seconds: StepSeconds, n_rows: int, *took: float) -> None:
    for each in took:
        seconds.learn(n_rows, each)


def test_more_tokens_never_take_less() -> None:
    """By chance steps of two tokens took less than steps of one; a line on to 60 would be below 0."""
    seconds = StepSeconds()
    learn(seconds, 1, 9.0, 1.0)
    learn(seconds, 2, 9.0, 0.98)
    assert seconds.of(60) == pytest.approx(0.98)
    assert seconds.knows(2)
    assert not seconds.knows(0)


def test_seconds_of_deeper_texts_do_not_tell_sizes_apart() -> None:
    """Steps of 3 tokens take 1.3 times as long as steps of one, and all take longer from token to token."""
    seconds, depth = StepSeconds(), 0
    for i in range(400):
        n_rows = 1 if i % 100 in (98, 99) else 3  # a text says its last tokens alone
        depth = depth + n_rows if i % 100 else 20
        seconds.learn(n_rows, (1.0 + depth / 200) * (1.3 if n_rows == 3 else 1.0), depth)
        if i > 300:
            assert seconds.of(3) / seconds.of(1) == pytest.approx(1.3, rel=0.05)


def test_the_step_that_makes_a_graph_does_not_count() -> None:
    """Nor does what it would be, for numbers of tokens that are near."""
    seconds = StepSeconds()
    learn(seconds, 1, 50.0, 1.0)
    learn(seconds, 5, 70.0)
    assert seconds.of(5) < 2.0
    learn(seconds, 5, 2.0)
    assert seconds.of(5) / seconds.of(1) == pytest.approx(2.0)


def test_what_disturbs_a_step_is_soon_forgotten() -> None:
    """The second step of its number took four times as long."""
    seconds = StepSeconds()
    learn(seconds, 1, 9.0, *[1.0] * 9)
    learn(seconds, 3, 9.0, 6.0)
    for _ in range(4):
        learn(seconds, 1, 1.0)
        learn(seconds, 3, 1.5)
    assert seconds.of(3) / seconds.of(1) < 2.5


def test_a_new_text_has_the_usual_rate_until_its_own_is_known() -> None:
    record = Acceptance()
    assert record.rate(0) == 0.5
    assert record.rate(0, 0.9) == pytest.approx(0.9)
    for _ in range(100):
        record.learn(0, 2, 0)
    assert record.rate(0, 0.9) < 0.05
    for _ in range(100):
        record.learn(9, 8, 8)
    assert record.rate(9) > 0.99  # a draft of 16 such tokens is worth making


def gate(**seconds: float) -> Gate:
    """seconds: r1=1.0 says that steps of one token take a second."""
    found = Gate()
    for name, each in seconds.items():
        learn(found.seconds, int(name[1:]), each, each)
    found.begin(1, 1)
    return found


def test_a_draft_is_as_long_as_it_pays() -> None:
    """By hand: 8 tokens at 0.9 say 1 + 5.126 in 2 seconds, 16 say 1 + 7.332 in 3.8 seconds."""
    assert gate(r1=1.0, r9=2.0, r17=3.8).lengths([(0.9, 16)]) == [8]
    assert gate(r1=1.0, r9=2.0, r17=2.2).lengths([(0.9, 16)]) == [16]
    assert gate(r1=1.0, r9=9.0).lengths([(0.9, 16)]) == [0]  # a token more takes a second, and says 0.9
    assert gate(r1=1.0, r2=1.49).lengths([(0.5, 1)]) == [1]
    assert gate(r1=1.0, r2=1.51).lengths([(0.5, 1)]) == [0]
    assert gate(r1=1.0, r2=1.1).lengths([(0.5, 1)], each=0.5) == [0]
    assert gate(r1=1.0, r2=1.0).lengths([(0.5, 0)]) == [0]


def test_others_share_what_a_step_lasts() -> None:
    """Two texts: a step of 3 tokens says 2.6 in 1.2 seconds; one of 4 says 3.2 in 1.4: 2.17, 2.29 > 2."""
    found = gate(r2=1.0, r3=1.2, r4=1.4)
    found.begin(2, 2)
    assert found.lengths([(0.6, 1), (0.6, 1)]) == [1, 1]
    found = gate(r2=1.0, r3=1.2, r4=1.6)
    found.begin(2, 2)
    assert found.lengths([(0.6, 1), (0.6, 1)]) == [1, 0]


def test_drafts_of_all_texts_pay_where_one_alone_does_not() -> None:
    """Steps of 5 to 12 tokens take the same: one draft makes 5.7 in 1.8 seconds, four 10.6; none 4 in 1."""
    found = gate(r4=1.0, r5=1.8, r12=1.8)
    found.begin(4, 4)
    assert found.lengths([(0.9, 2)]) == [0]
    assert found.lengths([(0.9, 2)] * 4) == [2] * 4


def test_texts_whose_guesses_hold_come_first() -> None:
    found = gate(r3=1.0, r5=1.1, r9=3.0)
    found.begin(3, 3)
    assert found.lengths([(0.1, 2), (0.9, 2), (0.2, 2)]) == [0, 2, 0]


def test_what_does_not_pay_is_tried_again_seldom() -> None:
    """A draft of one token makes 1.1 in 2 seconds: to lose 0.45 of a step in each 112 is 0.4 %."""
    found = gate(r1=1.0, r2=2.0, r9=9.0)
    drafted = []
    for _ in range(1024):
        found.begin(1, 1)
        drafted += found.lengths([(0.1, 8)])
    assert [n for n in drafted if n] == [1] * 9


def test_what_nearly_pays_is_tried_often() -> None:
    """With all texts, whose guesses hold as often as those of others, for all that is known."""
    found = gate(r4=1.0, r8=1.52, r12=2.7)
    drafted = []
    for _ in range(300):
        found.begin(4, 4)
        drafted.append(found.lengths([(0.5, 2)] * 4))
    tried = [each for each in drafted if any(each)]
    assert tried == [[1] * 4] * len(tried)
    assert 50 < len(tried) < 100


def test_a_gate_tells_that_it_has_refused() -> None:
    """In this step: 16 tokens more take a hundred times as long as one alone, and hardly any guess holds."""
    found = Gate()
    learn(found.seconds, 1, 1.0, 1.0)
    learn(found.seconds, 17, 100.0, 100.0)
    found.begin(1, 1)
    assert not found.has_refused
    assert found.lengths([(0.01, 16)]) == [0]
    assert found.has_refused
    found.begin(1, 1)
    assert not found.has_refused
    assert found.lengths([(0.01, 0)]) == [0]  # there was nothing to refuse
    assert not found.has_refused


def test_what_steps_take_without_drafts_is_measured() -> None:
    """Of four texts: the first two steps have no drafts, nor has one after each 256 with drafts."""
    found, drafted = Gate(), []
    for _ in range(2 * 256 + 4):
        found.begin(4, 4)
        drafted += found.lengths([(0.9, 4)])
        found.seconds.learn(4 + drafted[-1], 1.0)
    assert [i for i, n in enumerate(drafted) if not n] == [0, 1, 258, 515]
    found.begin(3, 3)  # a text has ended; nothing tells what less than four tokens take
    assert found.lengths([(0.9, 4)]) == [0]
    assert not found.has_refused


def test_a_draft_that_took_long_once_is_made_again() -> None:
    seconds = Seconds()
    for took in (50.0, 1.0, 1000.0):  # it made graphs; as ever; and was kept waiting
        seconds.learn(took)
    assert seconds.average == pytest.approx(1.05)

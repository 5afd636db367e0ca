"""Which worker gets a request."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pykvgraph.cluster.prefixes import blocks_of
from pykvgraph.cluster.router import OVERLOAD, SLACK, Router, Ticket

HELLO = blocks_of(b"", [b"hello"])


def router_of(n: int, n_slots: int = 4) -> Router:
    router = Router(n_slots)
    for worker in range(n):
        router.add(worker, 1000)
    return router


def test_the_longest_prefix_wins() -> None:
    router = router_of(3)
    router.enter(1, HELLO, 10).leave()
    longer = blocks_of(b"", [b"hello", b"you"])
    assert router.choose(longer) == 1
    router.enter(2, longer, 10)
    assert router.choose(longer) == 2  # loaded as it is
    assert router.choose(HELLO) == 1  # both have as much, and this one is idle
    assert router.choose(blocks_of(b"", [b"you"])) == 0


def test_the_least_loaded_gets_what_nobody_has() -> None:
    router = router_of(2)
    heavy = router.enter(0, [], 500)
    light = [router.enter(1, [], 100) for _ in range(3)]
    assert router.choose(HELLO) == 1
    heavy.leave()
    assert router.choose(HELLO) == 0
    for each in light:
        each.leave()
    assert router.n_requests(0) == router.n_requests(1) == 0


def test_an_overloaded_worker_is_passed_over() -> None:
    router = router_of(2)
    router.enter(0, HELLO, SLACK)
    assert router.choose(HELLO) == 0
    more = router.enter(0, HELLO, 1)
    assert router.choose(HELLO) == 1
    router.enter(1, [], 1)
    assert OVERLOAD * 1 >= 1 and router.choose(HELLO) == 0
    more.leave()
    assert router.choose(HELLO) == 0


def test_a_worker_without_a_free_slot_is_passed_over() -> None:
    router = router_of(2, n_slots=2)
    for _ in range(2):
        router.enter(0, HELLO, 1)
    assert router.choose(HELLO) == 1
    for _ in range(2):
        router.enter(1, [], 1)
    assert router.choose(HELLO) == 0  # nobody has one


def test_who_drains_gets_nothing_new() -> None:
    router = router_of(2)
    last = router.enter(0, HELLO, 1)
    router.drain(0)
    assert router.choose(HELLO) == 1 and router.n_requests(0) == 1
    last.leave()
    router.remove(0)
    router.drain(1)
    assert router.choose(HELLO) is None


def test_who_comes_again_has_nothing() -> None:
    router = router_of(2)
    old = router.enter(1, HELLO, 10)
    router.remove(1)
    assert router.choose(HELLO) == 0 and router.n_requests(1) == 0
    router.add(1, 1000)
    old.leave()  # of the one that is gone
    assert router.n_requests(1) == 0
    assert router.choose(HELLO) == 0


def test_who_failed_is_asked_again_only_when_there_is_nobody_else() -> None:
    router = router_of(2)
    router.enter(1, HELLO, 1).leave()
    assert router.choose(HELLO, without={1}) == 0
    assert router.choose(HELLO, without={0, 1}) == 1


class Naive:
    """The rule of docs/cluster.md, word for word, over all that was ever asked."""

    def __init__(self, n: int, n_slots: int) -> None:
        self.n_slots = n_slots
        self.asked: dict[int, list[list[bytes]]] = {worker: [] for worker in range(n)}
        self.weights: dict[int, list[int]] = {worker: [] for worker in range(n)}
        self.draining: set[int] = set()

    def had(self, worker: int, text: list[bytes]) -> int:
        """Bytes of the text."""
        best = 0
        for other in self.asked[worker]:
            n = 0
            while n < min(len(text), len(other)) and text[n] == other[n]:
                n += 1
            best = max(best, sum(map(len, text[:n])))
        return best

    def choose(self, text: list[bytes], without: set[int]) -> int | None:
        there = [worker for worker in self.asked if worker not in self.draining]
        there = [worker for worker in there if worker not in without] or there
        if not there:
            return None
        free = [worker for worker in there if len(self.weights[worker]) < self.n_slots] or there
        least = min(sum(self.weights[worker]) for worker in free)
        fit = [worker for worker in free if sum(self.weights[worker]) <= OVERLOAD * least + SLACK]

        def rank(worker: int) -> tuple[int, int, int, int]:
            weights = self.weights[worker]
            return -self.had(worker, text), sum(weights), len(weights), worker

        return min(fit, key=rank)


TEXT = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=5)
DEED = st.one_of(
    st.tuples(st.just("ask"), TEXT, st.sampled_from([1, 10, SLACK // 2, 3 * SLACK])),
    st.tuples(st.just("ask"), TEXT, st.sampled_from([1, 10, SLACK // 2, 3 * SLACK])),
    st.tuples(st.just("without"), TEXT, st.sets(st.integers(0, 4))),
    st.tuples(st.just("leave"), st.integers(0, 30), st.none()),
    st.tuples(st.sampled_from(["drain", "again"]), st.integers(0, 4), st.none()),
)


@settings(max_examples=400)
@given(st.integers(1, 5), st.integers(1, 3), st.lists(DEED, max_size=40))
def test_the_rule(n: int, n_slots: int, deeds: list[tuple[str, Any, Any]]) -> None:
    router, naive = router_of(n, n_slots), Naive(n, n_slots)
    tickets: list[tuple[Ticket, list[int], int]] = []
    for deed, what, more in deeds:
        if deed in ("ask", "without"):
            without = more if deed == "without" else set()
            blocks = blocks_of(b"", what)
            chosen = router.choose(blocks, without)
            assert chosen == naive.choose(what, without)
            if deed == "ask" and chosen is not None:
                tickets.append((router.enter(chosen, blocks, more), naive.weights[chosen], more))
                naive.weights[chosen].append(more)
                naive.asked[chosen].append(what)
        elif deed == "leave" and tickets:
            ticket, weights, weight = tickets.pop(what % len(tickets))
            ticket.leave()
            weights.remove(weight)
        elif deed == "drain" and what < n:
            router.drain(what)
            naive.draining.add(what)
        elif deed == "again" and what < n:
            router.remove(what)
            router.add(what, 1000)
            naive.asked[what], naive.weights[what] = [], []
            naive.draining.discard(what)
        for worker in range(n):
            assert router.n_requests(worker) == len(naive.weights[worker])

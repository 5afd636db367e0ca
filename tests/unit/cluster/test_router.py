"""Which worker gets a request."""

from __future__ import annotations

from pykvgraph.cluster.prefixes import blocks_of
from pykvgraph.cluster.router import OVERLOAD, SLACK, Router

HELLO = blocks_of(b"", [b"hello"])


def router_of(n: int, n_slots: int = 4) -> Router:
    router = Router(n_slots)
    for worker in range(n):
        router.add(worker)
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
    router.add(1)
    old.leave()  # of the one that is gone
    assert router.n_requests(1) == 0
    assert router.choose(HELLO) == 0


def test_who_failed_is_asked_again_only_when_there_is_nobody_else() -> None:
    router = router_of(2)
    router.enter(1, HELLO, 1).leave()
    assert router.choose(HELLO, without={1}) == 0
    assert router.choose(HELLO, without={0, 1}) == 1

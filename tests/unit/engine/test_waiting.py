"""The engine's queue beside a list that is sorted anew each time."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pykvgraph.engine.waiting import Waiting

N_FIRST = 64


class Text:
    """As much of a RequestSequence as the queue looks at."""

    def __init__(self, priority: int, order: int) -> None:
        self.priority = priority
        self.order = order


class Counted(int):
    """A priority that counts how often it is compared."""

    n = 0

    def __neg__(self) -> Counted:
        return Counted(-int(self))

    def __lt__(self, other: object) -> bool:
        Counted.n += 1
        return int(self) < int(other)  # type: ignore[call-overload,no-any-return]

    def __eq__(self, other: object) -> bool:
        Counted.n += 1
        return int(self) == int(other)  # type: ignore[call-overload,no-any-return]

    __hash__ = int.__hash__


def key(text: Text) -> tuple[int, int]:
    return -text.priority, text.order


# who comes: a priority and an order. Who leaves: which of those that are there. None: whoever is first
steps = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2), st.integers(0, 9)),
        st.integers(0, 10_000),
        st.none(),
    ),
    max_size=400,
)


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 300))
def test_as_a_list_that_is_sorted(steps: list[Any], n: int) -> None:
    """n wait before: more than are kept sorted, or fewer."""
    waiting, naive = Waiting(), []
    for step in [*((i % 3, i // 2) for i in range(n)), *steps]:
        if isinstance(step, tuple):
            text: Any = Text(*step)
            waiting.add(text)
            naive.append(text)
            naive.sort(key=key)  # it keeps the order of equals
        elif naive:
            text = naive.pop(0 if step is None else step % len(naive))
            assert text in waiting
            waiting.remove(text)
            assert text not in waiting
        assert len(waiting) == len(naive)
        assert waiting.first() == naive[:N_FIRST]
    assert list(waiting) == naive
    waiting.clear()
    assert not waiting and waiting.first() == [] and list(waiting) == []


def test_the_work_hardly_grows_with_how_many_wait() -> None:
    """Those who come, enter and leave from the middle: comparisons for each of them."""

    def work(n: int) -> float:
        waiting = Waiting()
        texts: list[Any] = [Text(Counted(i % 5), i) for i in range(n)]
        Counted.n = 0
        for text in texts:
            waiting.add(text)
        for text in texts[::2]:
            waiting.remove(text)
        n_left = len(waiting)
        while first := waiting.first():
            waiting.remove(first[0])
            n_left -= 1
        assert n_left == 0
        return Counted.n / n

    few, many = work(500), work(16_000)  # 32 times as many: five comparisons more for each place of a heap
    assert many < 2.5 * few


def test_those_who_left_are_forgotten() -> None:
    """However many come and leave behind those who wait."""
    waiting = Waiting()
    for i in range(100):
        waiting.add(Text(1, i))  # type: ignore[arg-type]
    for i in range(20_000):
        text: Any = Text(0, i)
        waiting.add(text)
        waiting.remove(text)
    assert len(waiting) == 100
    assert len(waiting._rest) < 1000

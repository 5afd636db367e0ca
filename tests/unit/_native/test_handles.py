from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest

from pykvgraph._native.handles import Handle
from pykvgraph.errors import InvalidArgumentError


def test_call_passes_the_pointer_and_the_rest() -> None:
    handle = Handle(7, lambda _: None, "thing")
    assert handle.call(lambda pointer, a, b: (pointer, a, b), 1, 2) == (7, 1, 2)


def test_open_owns_what_the_function_makes() -> None:
    freed: list[int] = []

    def make(value: int, out: Any) -> None:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = value

    handle = Handle.open(make, 7, free=freed.append, name="thing")
    assert handle.call(lambda pointer: pointer) == 7
    handle.close()
    assert freed == [7]


def test_close_frees_once_and_calls_raise_then() -> None:
    freed: list[int] = []
    handle = Handle(7, freed.append, "thing")
    handle.close()
    handle.close()
    assert freed == [7]
    with pytest.raises(InvalidArgumentError, match="the thing is closed"):
        handle.call(lambda pointer: pointer)
    del handle
    gc.collect()
    assert freed == [7]


def test_the_garbage_collector_frees() -> None:
    freed: list[int] = []
    handle = Handle(7, freed.append, "thing")
    del handle
    gc.collect()
    assert freed == [7]


def test_an_error_leaves_it_usable() -> None:
    handle = Handle(7, lambda _: None, "thing")
    with pytest.raises(ZeroDivisionError):
        handle.call(lambda pointer: pointer // 0)
    assert handle.call(lambda pointer: pointer) == 7


def test_calls_of_two_threads_wait_and_close_waits_too() -> None:
    events: list[str] = []
    entered, leave = threading.Event(), threading.Event()
    handle = Handle(7, lambda _: events.append("freed"), "thing")

    def slow(_: int) -> None:
        entered.set()
        assert leave.wait(10)
        events.append("slow done")

    def late() -> None:
        try:
            handle.call(lambda _: events.append("late done"))
        except InvalidArgumentError:
            events.append("late refused")

    threads = [threading.Thread(target=handle.call, args=(slow,))]
    threads[0].start()
    assert entered.wait(10)
    threads += [threading.Thread(target=late), threading.Thread(target=handle.close)]
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.05)
    threads[2].join(0.05)
    assert events == []
    leave.set()
    for thread in threads:
        thread.join(10)
    assert events[0] == "slow done"
    assert sorted(events[1:]) in (["freed", "late done"], ["freed", "late refused"])


def test_a_call_within_a_call_is_refused_and_a_close_waits_for_its_end() -> None:
    freed: list[int] = []
    handle = Handle(7, freed.append, "thing")

    def outer(pointer: int) -> int:
        with pytest.raises(InvalidArgumentError, match="in use by the call that this one interrupted"):
            handle.call(lambda _: None)
        handle.close()
        assert freed == []
        return pointer

    assert handle.call(outer) == 7
    assert freed == [7]
    with pytest.raises(InvalidArgumentError, match="closed"):
        handle.call(lambda _: None)

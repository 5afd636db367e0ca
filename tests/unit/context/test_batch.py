from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.context.batch import Batch
from pykvgraph.errors import InvalidArgumentError

Row = tuple[int, int, tuple[int, ...], int]


def rows(batch: Batch) -> list[Row]:
    """(token, pos, sequences, logits) of every token."""
    arrays = batch.snapshot()
    assert arrays.token.dtype == arrays.pos.dtype == arrays.seq_begin.dtype == arrays.seq_id.dtype == np.int32
    assert arrays.logits.dtype == np.uint8
    assert len(arrays.seq_begin) == len(batch) + 1
    return [
        (
            int(arrays.token[i]),
            int(arrays.pos[i]),
            tuple(arrays.seq_id[arrays.seq_begin[i] : arrays.seq_begin[i + 1]].tolist()),
            int(arrays.logits[i]),
        )
        for i in range(len(batch))
    ]


def test_add() -> None:
    batch = Batch()
    batch.add(7, 0)
    batch.add(8, 1, seq_ids=(2, 0), logits=True)
    assert rows(batch) == [(7, 0, (0,), 0), (8, 1, (2, 0), 1)]


@pytest.mark.parametrize(("logits", "wanted"), [("all", [1, 1, 1]), ("last", [0, 0, 1]), (False, [0, 0, 0])])
def test_extend(logits: Any, wanted: list[int]) -> None:
    batch = Batch()
    batch.add(1, 0)
    batch.extend(np.array([5, 6, 7]), 10, seq_ids=[1, 3], logits=logits)
    assert rows(batch)[1:] == [(5 + i, 10 + i, (1, 3), wanted[i]) for i in range(3)]


def test_extend_asks_for_the_last_by_default() -> None:
    batch = Batch()
    batch.extend([1, 2], 0)
    assert [row[3] for row in rows(batch)] == [0, 1]


def test_extend_by_nothing() -> None:
    batch = Batch()
    batch.extend([], 5)
    assert len(batch) == 0


def test_clear_leaves_nothing_behind() -> None:
    batch = Batch()
    batch.extend([1, 2, 3], 0, seq_ids=(0, 1), logits="all")
    batch.clear()
    assert len(batch) == 0
    batch.add(4, 9)
    assert rows(batch) == [(4, 9, (0,), 0)]


calls = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**31 - 1), max_size=100),
        st.integers(0, 2**31 - 101),
        st.lists(st.integers(0, 255), min_size=1, max_size=3),
        st.sampled_from(["all", "last", False]),
    ),
    max_size=6,
)


@given(calls)
def test_extend_is_many_adds(calls: list[tuple[list[int], int, list[int], Any]]) -> None:
    extended, added = Batch(), Batch()
    for tokens, pos0, seq_ids, logits in calls:
        extended.extend(tokens, pos0, seq_ids, logits)
        for i, token in enumerate(tokens):
            wants = logits == "all" or (logits == "last" and i == len(tokens) - 1)
            added.add(token, pos0 + i, seq_ids, wants)
    assert rows(extended) == rows(added)


BAD_INTEGERS = [-1, 2**31, 2**63, -(2**63) - 1, 1.5, "1", None, True]


@pytest.mark.parametrize("bad", BAD_INTEGERS)
@pytest.mark.parametrize("where", ["token", "pos", "seq_ids"])
def test_bad_add_changes_nothing(bad: Any, where: str) -> None:
    batch = Batch()
    batch.add(1, 0)
    before = rows(batch)
    arguments: dict[str, Any] = {"token": 2, "pos": 1, "seq_ids": (0,)}
    arguments[where] = (0, bad) if where == "seq_ids" else bad
    with pytest.raises(InvalidArgumentError, match=where):
        batch.add(**arguments)
    assert rows(batch) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"tokens": [1, -1]}, r"tokens\[1\]"),
        ({"tokens": [1, 2**31]}, r"tokens\[1\]"),
        ({"tokens": "text"}, "tokens"),
        ({"tokens": [[1]]}, "tokens"),
        ({"pos0": -1}, "pos0"),
        ({"pos0": 2**31 - 2}, "pos0"),  # the third token would be at 2^31
        ({"pos0": 2**31 - 3, "checkpoints": (2**31 - 1, 2**31)}, r"checkpoints\[1\]"),
        ({"seq_ids": ()}, "seq_ids is empty"),
        ({"seq_ids": 0}, "seq_ids"),
        ({"seq_ids": "0"}, "seq_ids"),
        ({"seq_ids": (2**31,)}, "seq_ids"),
        ({"logits": True}, 'logits must be "all", "last" or False'),
        ({"logits": "first"}, 'logits must be "all", "last" or False'),
        ({"logits": 0}, 'logits must be "all", "last" or False'),
        ({"logits": None}, 'logits must be "all", "last" or False'),
    ],
)
def test_bad_extend_changes_nothing(arguments: dict[str, Any], told: str) -> None:
    batch = Batch()
    batch.add(1, 0)
    before = rows(batch)
    with pytest.raises(InvalidArgumentError, match=told):
        batch.extend(**{"tokens": [1, 2, 3], "pos0": 1, **arguments})
    assert rows(batch) == before


def test_positions_reach_the_last_int32() -> None:
    batch = Batch()
    batch.extend([1, 2], 2**31 - 2)
    assert [row[1] for row in rows(batch)] == [2**31 - 2, 2**31 - 1]


def test_checkpoints_reach_the_last_int32() -> None:
    batch = Batch()
    batch.extend([1, 2], 2**31 - 2, checkpoints=(2**31 - 1,))
    assert batch.snapshot().checkpoint.tolist() == [1, 0]
    with pytest.raises(InvalidArgumentError, match="pos must be from 0 to 2147483646"):
        batch.add(1, 2**31 - 1, checkpoint=True)
    assert len(batch) == 2


@pytest.mark.parametrize("logits", [1, "last", None])
def test_add_takes_only_a_bool(logits: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="logits must be True or False"):
        Batch().add(1, 0, logits=logits)


@contextlib.contextmanager
def at_alarm(handler: Any) -> Iterator[None]:
    """Without garbage collection, which calls hypothesis: what the handler raises in there is lost."""
    before = signal.signal(signal.SIGALRM, handler)
    gc.disable()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def test_what_breaks_off_changes_nothing_or_is_done() -> None:
    batch = Batch()
    n_alarms = n_broken = 0

    class BrokenError(Exception):
        pass

    def fail(*_: object) -> None:
        nonlocal n_alarms
        n_alarms += 1
        raise BrokenError

    with at_alarm(fail):
        for i in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)  # on a busy machine the alarm comes right here
                while n_alarms == i:  # an exception may be lost where Python can't raise it
                    batch.extend(range(50), 2, seq_ids=(0, 1))
            except BrokenError:
                n_broken += 1
            assert len(batch) % 50 == 0
            assert len(rows(batch)) == len(batch)
            batch.clear()
    assert n_broken > 50
    batch.extend([3], 2)
    assert rows(batch) == [(3, 2, (0,), 1)]


def test_snapshot_is_a_copy() -> None:
    batch = Batch()
    batch.add(1, 0)
    arrays = batch.snapshot()
    batch.clear()
    batch.add(2, 5)
    assert arrays.token.tolist() == [1]
    assert arrays.pos.tolist() == [0]


def test_snapshots_are_whole_while_another_thread_fills() -> None:
    batch = Batch()
    done = threading.Event()

    def fill() -> None:
        while not done.is_set():
            batch.clear()
            batch.extend(range(200), 0, seq_ids=(0, 1))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(500):
            arrays = batch.snapshot()
            assert len(arrays.token) == len(arrays.pos) == len(arrays.logits) == len(arrays.seq_begin) - 1
            assert arrays.seq_begin[-1] == len(arrays.seq_id)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("values", [np.array(3), np.array(3.0), 3, None])
def test_sequences_that_are_not_several(values: Any) -> None:
    batch = Batch()
    with pytest.raises(InvalidArgumentError, match="seq_ids must be several integers"):
        batch.add(1, 0, values)
    assert len(batch) == 0


def test_a_signal_handler_that_changes_the_batch_as_well() -> None:
    """In the middle of a change, in the same thread: all tokens are there, and none is half there."""
    batch = Batch()
    taken = own = 0

    def handler(*_: object) -> None:
        nonlocal taken
        batch.add(5, 6, (7, 8))
        taken += 1

    with at_alarm(handler):
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while taken < 100:
            batch.add(1, 2, (3,))
            own += 1
    found = rows(batch)
    assert len(found) == own + taken
    assert found.count((1, 2, (3,), 0)) == own
    assert found.count((5, 6, (7, 8), 0)) == taken

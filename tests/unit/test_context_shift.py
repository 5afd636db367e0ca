"""The policies' arithmetic, on a cache that is a list of positions."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.context_shift import ContextShift, self_extend
from pykvgraph.errors import CacheFullError, InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache import KVCache
from pykvgraph.types import CellsView, ShiftReport, UpdateStats

STATS = UpdateStats(shifted_cells=3, moved_cells=2, moved_bytes=100, graphs=2, seconds=0.5)


class FakeCache:
    """kv-cache.md's operations on (name, position, sequences) triples; a cell is known by its name."""

    n_seq_max = 2

    def __init__(self, n: int, shared_from: int | None = None, can_shift: bool = True) -> None:
        self.can_shift = can_shift
        self.calls: list[str] = []
        self.cells_: list[tuple[int, int, set[int]]] = [
            (i, i, {0, 1} if shared_from is not None and i >= shared_from else {0}) for i in range(n)
        ]

    def _in(self, pos: int, p0: int, p1: int) -> bool:
        return pos >= max(p0, 0) and (p1 < 0 or pos < p1)

    def positions(self, seq: int = 0) -> dict[int, int]:
        return {name: pos for name, pos, seqs in self.cells_ if seq in seqs}

    def seq_pos_max(self, seq: int) -> int:
        return max(self.positions(seq).values(), default=-1)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.calls.append("seq_rm")
        kept = [(n, p, s - {seq} if self._in(p, p0, p1) else s) for n, p, s in self.cells_]
        self.cells_ = [cell for cell in kept if cell[2]]

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.calls.append("seq_add")
        moved = [(n, p + delta if seq in s and self._in(p, p0, p1) else p, s) for n, p, s in self.cells_]
        self.cells_ = [cell for cell in moved if cell[1] >= 0]

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.calls.append("seq_div")
        self.cells_ = [(n, p // d if seq in s and self._in(p, p0, p1) else p, s) for n, p, s in self.cells_]

    def defrag(self, policy: str) -> None:
        self.calls.append(f"defrag {policy}")

    def update(self) -> UpdateStats:
        self.calls.append("update")
        return STATS

    def cells(self) -> CellsView:
        pos = np.array([p for _, p, _ in self.cells_], np.int32)
        seq = np.array([[0 in s, 1 in s] for _, _, s in self.cells_], np.bool_)
        return CellsView(pos, seq, np.zeros(len(pos), np.int32))


def shift(cache: FakeCache, **arguments: Any) -> ShiftReport:
    return ContextShift(**arguments).apply(cast(KVCache, cache), 0)


def extend(cache: FakeCache, p0: int, p1: int, n_grp: int) -> int:
    return self_extend(cast(KVCache, cache), 0, p0, p1, n_grp)


@given(n=st.integers(1, 60), n_keep=st.integers(0, 60), n_discard=st.none() | st.integers(1, 60))
def test_shift(n: int, n_keep: int, n_discard: int | None) -> None:
    cache = FakeCache(n)
    if n_keep >= n:
        with pytest.raises(CacheFullError, match=f"{n} positions and the first {n_keep}"):
            shift(cache, n_keep=n_keep, n_discard=n_discard)
        assert cache.calls == []
        return
    report = shift(cache, n_keep=n_keep, n_discard=n_discard)
    gone = min(n_discard if n_discard is not None else max((n - n_keep) // 2, 1), n - n_keep)
    kept = [*range(n_keep), *range(n_keep + gone, n)]
    assert cache.positions() == {name: place for place, name in enumerate(kept)}
    assert report == ShiftReport(seq=0, n_keep=n_keep, n_discard=gone, n_past=n - gone, stats=STATS)
    assert cache.calls[-2:] == ["defrag fill", "update"]


def test_shift_tells_its_report() -> None:
    told: list[ShiftReport] = []
    report = shift(FakeCache(10), n_keep=2, on_shift=told.append)
    assert told == [report]


def test_shift_refuses_shared_cells_before_removing_any() -> None:
    cache = FakeCache(10, shared_from=8)
    with pytest.raises(UnsupportedError, match="shares cells"):
        shift(cache, n_keep=2)
    assert cache.calls == []


def test_shift_moves_past_a_shared_prefix() -> None:
    cache = FakeCache(10)
    cache.cells_ = [(n, p, {0, 1} if n < 4 else s) for n, p, s in cache.cells_]
    assert shift(cache, n_keep=2, n_discard=2).n_past == 8
    assert cache.positions(1) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_shift_refuses_a_model_that_cannot() -> None:
    cache = FakeCache(10, can_shift=False)
    with pytest.raises(UnsupportedError, match="can't be rotated"):
        shift(cache, n_keep=2)
    assert cache.calls == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"n_keep": -1}, "n_keep"),
        ({"n_keep": 1.0}, "n_keep"),
        ({"n_keep": True}, "n_keep"),
        ({"n_keep": 2**63}, "n_keep"),
        ({"n_keep": 0, "n_discard": 0}, "n_discard"),
        ({"n_keep": 0, "n_discard": -1}, "n_discard"),
        ({"n_keep": 0, "n_discard": "half"}, "n_discard"),
        ({"n_keep": 0, "on_shift": 5}, "on_shift"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        ContextShift(**arguments)


def test_numpy_integers_become_plain() -> None:
    policy = ContextShift(n_keep=cast(int, np.int64(3)), n_discard=cast(int, np.int32(2)))
    assert (type(policy.n_keep), type(policy.n_discard)) == (int, int)


@given(n=st.integers(1, 60), n_grp=st.integers(1, 8), data=st.data())
def test_self_extend(n: int, n_grp: int, data: st.DataObject) -> None:
    p0 = data.draw(st.integers(0, n - 1))
    p1 = data.draw(st.integers(p0 + 1, n))
    cache = FakeCache(n)
    n_past = extend(cache, p0, p1, n_grp)
    grouped = p0 + -(-(p1 - p0) // n_grp)  # where the block ends now
    expected = {i: i if i < p0 else p0 + (i - p0) // n_grp if i < p1 else grouped + i - p1 for i in range(n)}
    assert cache.positions() == expected
    assert n_past == max(expected.values()) + 1


@pytest.mark.parametrize(("n_batch", "n_grp", "n_blocks"), [(8, 2, 5), (12, 4, 3), (6, 3, 4)])
def test_self_extend_is_that_of_passkey(n_batch: int, n_grp: int, n_blocks: int) -> None:
    """llama.cpp's examples/passkey: batch ib, once full, is moved by ib * bd and then divided."""
    ours, theirs = FakeCache(0), FakeCache(0)
    n_past = 0
    for block in range(n_blocks):
        names = range(block * n_batch, (block + 1) * n_batch)
        for cache in (ours, theirs):
            cache.cells_ += [(name, n_past + j, {0}) for j, name in enumerate(names)]
        end = n_past + n_batch
        delta = block * (n_batch // n_grp) * (n_grp - 1)
        theirs.seq_add(0, end - n_batch, end, delta)
        theirs.seq_div(0, end - n_batch + delta, end + delta, n_grp)
        n_past = extend(ours, end - n_batch, end, n_grp)
        assert ours.positions() == theirs.positions()
        assert n_past == theirs.seq_pos_max(0) + 1


@pytest.mark.parametrize("arguments", [(-1, 4, 2), (4, 4, 2), (5, 4, 2), (0, 4, 0), (0, 4, -2), (0.0, 4, 2)])
def test_bad_self_extend(arguments: tuple[int, int, int]) -> None:
    cache = FakeCache(10)
    with pytest.raises(InvalidArgumentError):
        extend(cache, *arguments)
    assert cache.calls == []

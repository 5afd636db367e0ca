"""The policies' arithmetic, on a cache that is a list of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.context.context_shift import ContextShift, make_room, self_extend
from pykvgraph.errors import CacheFullError, InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.types import CellsView, SeqCount, ShiftReport, UpdateStats

STATS = UpdateStats(shifted_cells=3, waiting_cells=0, moved_cells=2, moved_bytes=100, graphs=2, seconds=0.5)


class FakeCache:
    """kv-cache.md's operations on (name, position, sequences) triples; copies of a cell have its name."""

    n_seq_max = 2
    groups = ()

    def __init__(
        self, n: int, shared_from: int | None = None, n_cells: int = 100, can_shift: bool = True
    ) -> None:
        self.can_shift = can_shift
        self.n_cells = n_cells
        self.calls: list[str] = []
        self.cells_: list[tuple[int, int, set[int]]] = [
            (i, i, {0, 1} if shared_from is not None and i >= shared_from else {0}) for i in range(n)
        ]

    @property
    def n_free(self) -> int:
        return self.n_cells - len(self.cells_)

    def positions(self, seq: int = 0) -> dict[int, int]:
        return {name: pos for name, pos, seqs in self.cells_ if seq in seqs}

    def seq_pos_max(self, seq: int) -> int:
        return max(self.positions(seq).values(), default=-1)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.calls.append("seq_rm")
        kept = [(n, p, s - {seq} if p0 <= p and (p1 < 0 or p < p1) else s) for n, p, s in self.cells_]
        self.cells_ = [cell for cell in kept if cell[2]]

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.calls.append("seq_add")
        self._reposition(seq, p0, p1, lambda pos: pos + delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.calls.append("seq_div")
        self._reposition(seq, p0, p1, lambda pos: pos // d)

    def _reposition(self, seq: int, p0: int, p1: int, move: Callable[[int], int]) -> None:
        cells = []
        for name, pos, seqs in self.cells_:
            moves = seq in seqs and p0 <= pos and (p1 < 0 or pos < p1) and move(pos) != pos
            if moves and seqs > {seq}:
                cells.append((name, pos, seqs - {seq}))
            cells.append((name, move(pos), {seq}) if moves else (name, pos, seqs))
        assert len(cells) <= self.n_cells, "should have been refused before"
        self.cells_ = [cell for cell in cells if cell[1] >= 0]

    def defrag(self, policy: str) -> None:
        self.calls.append(f"defrag {policy}")

    def update(self) -> UpdateStats:
        self.calls.append("update")
        return STATS

    def cells(self) -> CellsView:
        empty = [(0, -1, set[int]())] * (self.n_cells - len(self.cells_))
        pos = np.array([p for _, p, _ in self.cells_ + empty], np.int32)
        seq = np.array([[0 in s, 1 in s] for _, _, s in self.cells_ + empty], np.bool_)
        return CellsView(pos, seq, np.zeros(len(pos), np.int32), np.zeros(len(pos), np.uint8))

    def _lost(self, group: int, seq: int) -> int:
        """There are no windows."""
        return -1

    def seq_count(self, seq: int, p0: int, p1: int) -> SeqCount:
        found = [s for _, p, s in self.cells_ if seq in s and p0 <= p and (p1 < 0 or p < p1)]
        return SeqCount(len(found), sum(len(s) > 1 for s in found))


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


@pytest.mark.parametrize(
    ("n", "shared_from", "n_discard", "n_copies", "n_gone"),
    [
        (10, 8, 4, 2, 4),  # the end is shared, what goes is the sequence's own
        (10, 4, 4, 4, 2),  # and what goes is shared in part
        (10, 0, 4, 4, 0),  # everything is shared: nothing becomes empty
        (10, 8, 8, 0, 6),  # what is shared goes itself
        (20, 2, 1, 17, 0),
    ],
)
def test_shift_copies_shared_cells_or_changes_nothing(
    n: int, shared_from: int, n_discard: int, n_copies: int, n_gone: int
) -> None:
    """There is room for the copies in the empty cells and in those that go and that nobody else sees."""
    others = FakeCache(n, shared_from).positions(1)
    enough = n + max(n_copies - n_gone, 0)
    cache = FakeCache(n, shared_from, n_cells=enough)
    assert shift(cache, n_keep=2, n_discard=n_discard).n_past == n - n_discard
    kept = [*range(2), *range(2 + n_discard, n)]
    assert cache.positions() == {name: place for place, name in enumerate(kept)}
    assert cache.positions(1) == others
    if enough > n:
        cache = FakeCache(n, shared_from, n_cells=enough - 1)
        with pytest.raises(CacheFullError, match=f"{n_copies} cells of sequence 0 are shared"):
            shift(cache, n_keep=2, n_discard=n_discard)
        assert cache.calls == []


def test_shift_moves_past_a_shared_prefix() -> None:
    cache = FakeCache(10, n_cells=10)
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


@given(
    n=st.integers(1, 40),
    n_keep=st.integers(0, 40),
    n_discard=st.none() | st.integers(1, 40),
    n_shared=st.integers(0, 40),
    n_spare=st.integers(0, 20),
    wanted=st.integers(0, 70),
)
def test_room_is_made_or_nothing_is_given_up(
    n: int, n_keep: int, n_discard: int | None, n_shared: int, n_spare: int, wanted: int
) -> None:
    """The first n_shared cells are another sequence's too: giving them up makes no room."""
    cache = FakeCache(n, n_cells=n + n_spare)
    cache.cells_ = [(name, p, {0, 1} if name < n_shared else s) for name, p, s in cache.cells_]
    others = cache.positions(1)
    policy = ContextShift(n_keep, n_discard)
    kv = cast(KVCache, cache)

    def make() -> None:
        make_room(kv, 0, wanted, n_keep, lambda: policy.apply(kv, 0))

    if wanted <= n_spare + max(n - max(n_keep, n_shared), 0):
        try:
            make()
        except CacheFullError as error:  # no room for the copies that the first shift needs
            assert "shared and would move" in str(error)
            assert cache.calls == []
        else:
            assert cache.n_free >= wanted
    else:
        with pytest.raises(CacheFullError, match=f"{wanted} tokens need as many empty cells"):
            make()
        assert cache.calls == []
    assert cache.positions(1) == others


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


@pytest.mark.parametrize(("p0", "shared_from", "n_copies"), [(0, 3, 7), (1, 3, 7), (4, 4, 6), (4, 0, 6)])
def test_self_extend_copies_shared_cells_or_changes_nothing(p0: int, shared_from: int, n_copies: int) -> None:
    """All three steps have room, or none is done."""
    alone = FakeCache(10)
    extend(alone, p0, 8, 2)
    cache = FakeCache(10, shared_from, n_cells=10 + n_copies)
    others = cache.positions(1)
    extend(cache, p0, 8, 2)
    assert cache.positions() == alone.positions()
    assert cache.positions(1) == others
    cache = FakeCache(10, shared_from, n_cells=10 + n_copies - 1)
    with pytest.raises(CacheFullError, match=f"{n_copies} cells of sequence 0 are shared"):
        extend(cache, p0, 8, 2)
    assert cache.calls == []


def test_self_extend_of_a_cache_that_is_all_shared() -> None:
    """Position 0 stays where it is: it needs no copy."""
    cache = FakeCache(10, shared_from=0, n_cells=19)
    extend(cache, 0, 10, 3)
    assert sum(seqs == {0, 1} for _, _, seqs in cache.cells_) == 1
    assert list(cache.positions(1).values()) == list(range(10))


@pytest.mark.parametrize("p0", [0, 1, 4, 9, 10, 2**62])
def test_self_extend_beyond_the_end_is_to_the_end(p0: int) -> None:
    cache, beyond = FakeCache(10), FakeCache(10)
    n_past = extend(cache, p0, 10, 2) if p0 < 10 else 10
    assert extend(beyond, p0, 2**63 - 1, 2) == n_past
    assert beyond.positions() == cache.positions()
    assert beyond.calls == cache.calls


def test_a_group_in_one_position_is_nothing() -> None:
    cache = FakeCache(10, shared_from=0, n_cells=10)
    assert extend(cache, 4, 5, 3) == 10
    assert cache.calls == []


@pytest.mark.parametrize("seq", [-1, 2, 2**64])
def test_self_extend_of_no_sequence(seq: int) -> None:
    with pytest.raises(InvalidArgumentError, match="seq"):
        self_extend(cast(KVCache, FakeCache(10)), seq, 0, 4, 2)


@pytest.mark.parametrize("arguments", [(-1, 4, 2), (4, 4, 2), (5, 4, 2), (0, 4, 0), (0, 4, -2), (0.0, 4, 2)])
def test_bad_self_extend(arguments: tuple[int, int, int]) -> None:
    cache = FakeCache(10)
    with pytest.raises(InvalidArgumentError):
        extend(cache, *arguments)
    assert cache.calls == []


def test_a_gap_costs_one_shift() -> None:
    """Two thousand million positions without a cell: each shift gives up a cell, and the gap before it."""
    kv = FakeCache(10)
    kv.cells_ = [(i, i if i < 4 else i + 2_000_000_000, {0}) for i in range(10)]
    report = ContextShift(n_keep=4, n_discard=1).apply(cast(KVCache, kv), 0)
    assert report.n_discard == 2_000_000_001
    assert kv.positions() == {0: 0, 1: 1, 2: 2, 3: 3, 5: 4, 6: 5, 7: 6, 8: 7, 9: 8}

"""A cache without K and V: each cell knows what its token had read when it was decoded, and for whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import pykvgraph as kvg
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.hold import Hold
from pykvgraph.types import SeqCount


class Reader:
    """Reads a text from its beginning on: a token's K and V are a function of it and of those before it."""

    def __init__(self) -> None:
        self._read = 0
        self.n = 0

    def key_of(self, token: int) -> int:
        """What stands for K and V of a token that comes next."""
        return hash((token, self._read))

    def add(self, key: int) -> None:
        """It comes next, with these."""
        self._read, self.n = hash((self._read, key)), self.n + 1


def exact_keys(ids: Sequence[int]) -> list[int]:
    """Of a text that is decoded from its beginning on."""
    return [*_exact_keys(tuple(ids))]


@lru_cache(64)  # a step asks for those of the whole text
def _exact_keys(ids: tuple[int, ...]) -> tuple[int, ...]:
    reader, keys = Reader(), list[int]()
    for token in ids:
        keys.append(reader.key_of(token))
        reader.add(keys[-1])
    return tuple(keys)


@dataclass(eq=False)
class NaiveCell:
    """who: whose request decoded it, or moved it last. was_exact: whether it was, where it was decoded."""

    pos: int
    key: int
    who: str
    was_exact: bool
    seqs: set[int]
    holds: set[int] = field(default_factory=set)


class NaiveCache:
    """The calls of a KVCache that the engine's entry makes, of full attention. who: for whom it works now."""

    def __init__(self, n_cells: int, n_seq_max: int) -> None:
        self.who = ""
        self.can_shift = True
        self.cells_used: dict[NaiveCell, None] = {}  # a set that keeps its order
        self._n_cells = n_cells
        self._texts: list[dict[int, NaiveCell]] = [{} for _ in range(n_seq_max)]  # by position
        self._held: dict[int, list[NaiveCell]] = {}
        self._n_holds = 0
        self.groups = [SimpleNamespace(kind="full", n_cells=n_cells, window=0, cell_bytes=1)]

    def as_cache(self) -> KVCache:
        return cast(KVCache, self)

    @property
    def n_free(self) -> int:
        return self._n_cells - len(self.cells_used)

    def text(self, seq: int) -> list[NaiveCell]:
        """The cells of a sequence, by position."""
        return self._range(seq, 0, -1)

    def cells(self, number: int) -> Any:
        import numpy as np

        seen = np.zeros((self._n_cells, len(self._texts)), np.bool_)
        for index, cell in enumerate(self.cells_used):
            seen[index, list(cell.seqs)] = True
        return SimpleNamespace(seq=seen)

    def decode(self, seq: int, ids: Sequence[int], places: Iterable[int]) -> None:
        """These tokens of a text, in rising order, each in place of what stands there."""
        text, reader = self._texts[seq], Reader()
        exact, replaced = exact_keys(ids), []
        for place in places:
            while reader.n < place:
                assert reader.n in text, "a token is decoded before others that it is to see"
                reader.add(text[reader.n].key)
            assert self.n_free, "there is no cell for a token"
            key = reader.key_of(ids[place])
            reader.add(key)
            if place in text:
                replaced.append(text[place])
            cell = NaiveCell(place, key, self.who, key == exact[place], {seq})
            self.cells_used[cell] = None
            text[place] = cell
        self._leave(replaced, seq)

    def update(self) -> None: ...

    def seq_pos_max(self, seq: int) -> int:
        return max(self._texts[seq], default=-1)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        found = self._range(seq, p0, p1)
        for cell in found:
            del self._texts[seq][cell.pos]
        self._leave(found, seq)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        for cell in self._range(src, p0, p1):
            cell.seqs.add(dst)
            self._texts[dst][cell.pos] = cell

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        text, moving = self._texts[seq], self._range(seq, p0, p1)
        for cell in moving:
            del text[cell.pos]
        assert not text.keys() & {cell.pos + delta for cell in moving}, "two tokens are on one position"
        if sum(map(self._is_shared, moving)) > self.n_free:
            for cell in moving:
                text[cell.pos] = cell
            raise kvg.CacheFullError("no room for copies")
        for cell in moving:
            if self._is_shared(cell):
                cell.seqs.remove(seq)
                cell = NaiveCell(cell.pos + delta, cell.key, self.who, cell.was_exact, {seq})
                self.cells_used[cell] = None
            else:
                cell.pos, cell.who = cell.pos + delta, self.who
            text[cell.pos] = cell

    def seq_count(self, seq: int, p0: int, p1: int) -> SeqCount:
        found = self._range(seq, p0, p1)
        return SeqCount(len(found), sum(map(self._is_shared, found)))

    def hold(self, seq: int, p0: int, p1: int) -> Hold:
        found = self._range(seq, p0, p1)
        assert [cell.pos for cell in found] == list(range(p0, p1))
        self._n_holds += 1
        self._held[self._n_holds] = found
        for cell in found:
            cell.holds.add(self._n_holds)
        return cast(Hold, NaiveHold(self, self._n_holds, p0))

    def attach(self, hold: NaiveHold, seq: int, p1: int = -1) -> None:
        assert hold.p0 == self.seq_pos_max(seq) + 1
        for cell in self._held[hold.number]:
            if p1 < 0 or cell.pos < p1:
                cell.seqs.add(seq)
                self._texts[seq][cell.pos] = cell

    def release(self, number: int) -> None:
        for cell in self._held.pop(number):
            cell.holds.remove(number)
            self._drop_unused(cell)

    def _range(self, seq: int, p0: int, p1: int) -> list[NaiveCell]:
        text = self._texts[seq]
        return [text[pos] for pos in sorted(text) if pos >= p0 and (p1 < 0 or pos < p1)]

    def _is_shared(self, cell: NaiveCell) -> bool:
        return len(cell.seqs) > 1 or bool(cell.holds)

    def _leave(self, cells: Iterable[NaiveCell], seq: int) -> None:
        for cell in cells:
            cell.seqs.remove(seq)
            self._drop_unused(cell)

    def _drop_unused(self, cell: NaiveCell) -> None:
        if not (cell.seqs or cell.holds):
            del self.cells_used[cell]


@dataclass
class NaiveHold:
    """What NaiveCache.hold() returns."""

    kv: NaiveCache
    number: int
    p0: int

    def release(self) -> None:
        self.kv.release(self.number)

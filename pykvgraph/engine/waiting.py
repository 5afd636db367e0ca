"""The texts that wait to run, in the order in which they may enter."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter
from typing import TypeAlias

from pykvgraph.engine.request_sequence import RequestSequence

_N_FIRST = 64  # that are looked at in a step, however many wait
_LEAST_STALE = 256  # entries of texts that have left, for which the heap is not made anew
_Key: TypeAlias = "tuple[int, int, int]"


class Waiting:
    """Higher priority first, then lower `order`; of equals, who came here first.

    The first ones are sorted; those behind them are a heap, where who leaves is forgotten later. So whoever
    comes or leaves takes a time that grows with the logarithm of how many wait.
    """

    def __init__(self) -> None:
        self._keys: dict[RequestSequence, _Key] = {}
        self._first: list[tuple[_Key, RequestSequence]] = []
        self._rest: list[tuple[_Key, RequestSequence]] = []  # a heap; all of it comes behind the first ones
        self._n_came = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, sequence: RequestSequence) -> bool:
        return sequence in self._keys

    def __iter__(self) -> Iterator[RequestSequence]:
        """All of them; takes a while, unlike first()."""
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def first(self) -> list[RequestSequence]:
        """Those that enter before all others, 64 at most."""
        self._fill()
        return [sequence for _, sequence in self._first]

    def add(self, sequence: RequestSequence) -> None:
        """It comes, and was not there."""
        self._n_came += 1
        key = self._keys[sequence] = (-sequence.priority, sequence.order, self._n_came)
        self._fill()
        insort(self._first, (key, sequence))
        if len(self._first) > _N_FIRST:
            heapq.heappush(self._rest, self._first.pop())

    def remove(self, sequence: RequestSequence) -> None:
        """It leaves. Raises KeyError for one that isn't there."""
        key = self._keys.pop(sequence)
        at = bisect_left(self._first, key, key=itemgetter(0))
        if at < len(self._first) and self._first[at][1] is sequence:
            del self._first[at]
        elif len(self._rest) > max(2 * len(self._keys), _LEAST_STALE):
            self._rest = [each for each in self._rest if self._is_there(*each)]
            heapq.heapify(self._rest)

    def clear(self) -> None:
        """All of them leave."""
        for each in (self._keys, self._first, self._rest):
            each.clear()

    def _fill(self) -> None:
        """As many are sorted as may be."""
        while self._rest and len(self._first) < _N_FIRST:
            entry = heapq.heappop(self._rest)
            if self._is_there(*entry):
                self._first.append(entry)

    def _is_there(self, key: _Key, sequence: RequestSequence) -> bool:
        return self._keys.get(sequence) == key

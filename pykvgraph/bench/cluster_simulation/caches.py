"""What simulated workers have in their caches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from pykvgraph.bench.cluster_simulation.traffic import SimulatedRequest, part_of
from pykvgraph.cluster.prefixes import Prefixes, TextBlock


class Caches:
    """Texts by worker; what was used longest ago goes first, and of one text its end.

    A text is an instruction and a talk, of which only the lengths are kept: a talk only grows, and an
    instruction is used with each of its talks, so that a worker that has some of a talk has all in front of
    it. n_tokens: of each worker.
    """

    def __init__(self, n_tokens: int) -> None:
        self._most = n_tokens
        # tokens of each part, those used longest ago first
        self._parts: dict[int, OrderedDict[int, int]] = {}
        self._n_tokens: dict[int, int] = {}
        self._holders: dict[int, dict[int, int]] = {}  # of each part: tokens that workers have

    def store(self, worker: int, asked: SimulatedRequest, n_said: int = 0) -> None:
        """The worker has this prompt, and n_said tokens of the answer; what has no room beside it goes."""
        parts = self._parts.setdefault(worker, OrderedDict())
        n_all = self._n_tokens.get(worker, 0)
        for part, n_more in (asked.talk, n_said), (asked.instruction, 0):
            had, n = parts.get(part.number, 0), part.n_tokens + n_more
            if n > had:
                n_all += n - had
                parts[part.number] = n
                self._holders.setdefault(part.number, {})[worker] = n
            parts.move_to_end(part.number)
        while n_all > self._most:
            number, n = next(iter(parts.items()))
            left = max(n - (n_all - self._most), 0)
            n_all -= n - left
            if left:
                parts[number] = self._holders[number][worker] = left
                continue
            del parts[number], self._holders[number][worker]
            if not self._holders[number]:
                del self._holders[number]
        self._n_tokens[worker] = n_all

    def n_cached(self, worker: int, asked: SimulatedRequest) -> int:
        """Tokens of the prompt that the worker has."""
        parts = self._parts.get(worker)
        if not parts:
            return 0
        n = min(parts.get(asked.instruction.number, 0), asked.instruction.n_tokens)
        if n == asked.instruction.n_tokens:
            n += min(parts.get(asked.talk.number, 0), asked.talk.n_tokens)
        return n

    def holders(self, block: TextBlock) -> Collection[int]:
        """The workers that have it."""
        number, n_tokens = part_of(block)
        return _Holders(self._holders.get(number, {}), n_tokens)


class Index(Prefixes):
    """What a router knows that knows at every moment what every cache has: a central index."""

    def __init__(self, caches: Caches) -> None:
        super().__init__()
        self._caches = caches

    def remember(self, worker: int, blocks: Sequence[TextBlock]) -> None:
        """Nothing: the caches are asked."""

    def holders(self, block: TextBlock) -> Collection[int]:
        """The workers whose caches have it."""
        return self._caches.holders(block)


class _Holders(Collection[int]):
    """The workers that have at least so many tokens of a part."""

    def __init__(self, n_tokens: Mapping[int, int], least: int) -> None:
        self._n_tokens = n_tokens
        self._least = least

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, int) and self._n_tokens.get(worker, 0) >= self._least

    def __iter__(self) -> Iterator[int]:
        return (worker for worker, n in self._n_tokens.items() if n >= self._least)

    def __len__(self) -> int:
        """At most so many: they are not counted."""
        return len(self._n_tokens)

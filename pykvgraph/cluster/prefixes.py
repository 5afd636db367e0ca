"""Which worker has which beginnings of texts, about."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

# About 64 tokens. The router sees text, not tokens: two texts that begin with the same bytes begin with the
# same tokens but for the last one or two, and a worker finds out itself how many of its cells fit.
BLOCK_BYTES = 256
MOST_BLOCKS = 4096  # of a text; what is behind them hardly changes who has most of it
TOKEN_BYTES = 4  # about
MOST_BYTES = 16 << 20  # of a worker's texts, in about 20 MB of memory


class TextBlock(NamedTuple):
    """A beginning of a text. key: the hash of all of it. end: its bytes."""

    key: bytes
    end: int


def blocks_of(root: bytes, parts: Iterable[bytes]) -> list[TextBlock]:
    """The beginnings of a text in parts that end with each part, and every BLOCK_BYTES in between.

    Equal keys mean equal roots, and equal parts up to there: each key is the hash of the one before and of
    its own bytes. So a conversation that goes on has all keys of its shorter self. root: whatever must be
    equal, too, for cells to be shared. At most MOST_BLOCKS.
    """
    found: list[TextBlock] = []
    key, end = xxhash.xxh3_128_digest(root), 0
    for part in parts:
        for begin in range(0, len(part), BLOCK_BYTES):
            if len(found) == MOST_BLOCKS:
                return found
            own = part[begin : begin + BLOCK_BYTES]
            # the length says where a part ends, so that "ab" and "c" are not "a" and "bc"
            key = xxhash.xxh3_128_digest(key + len(own).to_bytes(2, "little") + own)
            end += len(own)
            found.append(TextBlock(key, end))
    return found


@dataclass
class _HeldText:
    """Of a worker. sizes: bytes of each block, those used longest ago first. n_bytes: of all."""

    most: int
    sizes: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    n_bytes: int = 0


class Prefixes:
    """What each worker was asked last, as keys of blocks, as much of it as its cache has room for.

    What was asked longest ago goes first, as in the caches themselves.

    A worker that has a block has the blocks in front of it, as these are always the newer ones.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _HeldText] = {}
        self._holders: dict[bytes, int | set[int]] = {}  # nearly all keys have one, and a set is large

    def begin(self, worker: int, n_tokens: int) -> None:
        """The worker has nothing yet, and room for so many tokens; no more than MOST_BYTES are kept."""
        self.forget(worker)
        self._texts[worker] = _HeldText(min(n_tokens * TOKEN_BYTES, MOST_BYTES))

    def remember(self, worker: int, blocks: Sequence[TextBlock]) -> None:
        """The worker is asked for this text."""
        text = self._texts[worker]
        for i in reversed(range(len(blocks))):
            key = blocks[i].key
            if key not in text.sizes:
                text.sizes[key] = blocks[i].end - (blocks[i - 1].end if i else 0)
                text.n_bytes += text.sizes[key]
                self._gets(worker, key)
            text.sizes.move_to_end(key)
        while text.n_bytes > text.most:
            key, size = text.sizes.popitem(last=False)
            text.n_bytes -= size
            self._loses(worker, key)

    def forget(self, worker: int) -> None:
        """The worker has nothing any more."""
        text = self._texts.pop(worker, None)
        for key in text.sizes if text else ():
            self._loses(worker, key)

    def holders(self, block: TextBlock) -> Collection[int]:
        """The workers that have it."""
        found = self._holders.get(block.key, ())
        return (found,) if isinstance(found, int) else found

    def length(self, worker: int, blocks: Sequence[TextBlock]) -> int:
        """Bytes of this text that the worker has, from its beginning."""
        text = self._texts.get(worker)
        sizes: Container[bytes] = text.sizes if text else ()
        low, high = 0, len(blocks)  # has the first `low`, and not the one behind the first `high`
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1].key in sizes:
                low = middle
            else:
                high = middle - 1
        return blocks[low - 1].end if low else 0

    def _gets(self, worker: int, key: bytes) -> None:
        found = self._holders.get(key)
        if found is None:
            self._holders[key] = worker
        elif isinstance(found, set):
            found.add(worker)
        else:
            self._holders[key] = {found, worker}

    def _loses(self, worker: int, key: bytes) -> None:
        found = self._holders[key]
        if isinstance(found, int):
            del self._holders[key]
            return
        found.remove(worker)
        if len(found) == 1:
            self._holders[key] = found.pop()

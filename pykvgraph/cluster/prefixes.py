"""Which worker has which beginnings of texts, about."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

# About 64 tokens. The router sees text, not tokens: two texts that begin with the same bytes begin with the
# same tokens but for the last one or two, and a worker finds out itself how many of its cells fit.
BLOCK_BYTES = 256
MOST_BLOCKS = 4096  # of a text; what is behind them hardly changes who has most of it
MOST_KEYS = 1 << 16  # of a worker: 16 MiB of text, in about 10 MB of memory


class Block(NamedTuple):
    """A beginning of a text. key: the hash of all of it. end: its bytes."""

    key: bytes
    end: int


def blocks_of(root: bytes, parts: Iterable[bytes]) -> list[Block]:
    """The beginnings of a text in parts that end with each part, and every BLOCK_BYTES in between.

    Equal keys mean equal roots, and equal parts up to there: each key is the hash of the one before and of
    its own bytes. So a conversation that goes on has all keys of its shorter self. root: whatever must be
    equal, too, for cells to be shared. At most MOST_BLOCKS.
    """
    found: list[Block] = []
    key, end = xxhash.xxh3_128_digest(root), 0
    for part in parts:
        for begin in range(0, len(part), BLOCK_BYTES):
            if len(found) == MOST_BLOCKS:
                return found
            own = part[begin : begin + BLOCK_BYTES]
            # the length says where a part ends, so that "ab" and "c" are not "a" and "bc"
            key = xxhash.xxh3_128_digest(key + len(own).to_bytes(2, "little") + own)
            end += len(own)
            found.append(Block(key, end))
    return found


class Prefixes:
    """What each worker was asked last, as keys of blocks: `most` of them for each, the oldest go first.

    A worker that has a block has the blocks in front of it, as these are always the newer ones.
    """

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._keys: dict[int, OrderedDict[bytes, None]] = {}

    def remember(self, worker: int, blocks: Sequence[Block]) -> None:
        """The worker is asked for this text."""
        keys = self._keys.setdefault(worker, OrderedDict())
        for block in reversed(blocks[: self._most]):
            keys[block.key] = None
            keys.move_to_end(block.key)
        while len(keys) > self._most:
            keys.popitem(last=False)

    def forget(self, worker: int) -> None:
        """The worker has nothing any more."""
        self._keys.pop(worker, None)

    def length(self, worker: int, blocks: Sequence[Block]) -> int:
        """Bytes of this text that the worker has, from its beginning."""
        keys = self._keys.get(worker, OrderedDict())
        low, high = 0, len(blocks)  # has the first `low`, and not the one behind the first `high`
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1].key in keys:
                low = middle
            else:
                high = middle - 1
        return blocks[low - 1].end if low else 0

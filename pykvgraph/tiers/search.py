"""What the tiers have of a text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.context.common_length import common_length
from pykvgraph.prefix import block
from pykvgraph.tiers.record import Name
from pykvgraph.tiers.store import Store


class Parts(NamedTuple):
    """names: the parts of a text, in their order. n: how many of its tokens it has with them, 0: nothing more
    than before. known: how many of them are in cells or parts, though the model may not go on from all.
    """

    names: list[Name]
    n: int
    known: int


def parts_of(store: Store, ids: array[int], keys: Sequence[bytes], limit: int, *, has_points: bool) -> Parts:
    """What is behind the blocks with these keys, the root's first, for the first `limit` tokens of a text.

    has_points: texts go on from their ends only. An end before the last of these blocks may be the best then.
    """
    names = _blocks(store, ids, keys, limit)
    known = names[-1].span.stop if names else 0
    end, n_of_end = _best_end(store, ids, [*keys, *(name.key for name in names)], limit, has_points)
    if end is not None:
        depth, n_before = end.begin // block.N_TOKENS, len(keys) - 1
        names = [*names[: max(depth - n_before, 0)], end]
    elif has_points:
        names = []
    if not names:
        return Parts([], 0, known)
    n = end.begin + n_of_end if end else names[-1].span.stop
    return Parts(names, min(n, limit), known)


def _blocks(store: Store, ids: array[int], keys: Sequence[bytes], limit: int) -> list[Name]:
    """Those that are there, without a gap."""
    parent, begin = keys[-1], (len(keys) - 1) * block.N_TOKENS
    names: list[Name] = []
    while begin + block.N_TOKENS <= limit + 1:
        name = Name(block.TOKENS, parent, ids[begin : begin + block.N_TOKENS].tobytes(), begin)
        key = name.key
        if not store.has(key):
            break
        names.append(name)
        parent, begin = key, begin + block.N_TOKENS
    return names


def _best_end(
    store: Store, ids: array[int], keys: Sequence[bytes], limit: int, has_points: bool
) -> tuple[Name | None, int]:
    """The end of a text of which this one says the most, and how much; None, 0: there is none.

    keys: of its blocks, the root's first. With points, it says all of it, in whichever block.
    """
    for depth in range(len(keys) - 1, -1, -1):
        begin = depth * block.N_TOKENS
        behind = ids[begin : min(begin + block.N_TOKENS, limit)].tobytes()
        found = [(common_length(tokens, behind), tokens) for tokens in store.ends(keys[depth])]
        if has_points:
            found = [(n, tokens) for n, tokens in found if n * block.TOKEN_BYTES == len(tokens)]
        n, tokens = max(found, default=(0, b""))
        if n:
            return Name(block.END, keys[depth], tokens, begin), n
        if not has_points:
            break
    return None, 0

"""Parts of an older text that come again in a new one, at other positions: their cells are moved there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.context.common_length import common_length
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.prefix import block


class Part(NamedTuple):
    """n tokens that the old text has from position `old` on, and the new one from `new` on."""

    old: int
    new: int
    n: int


def salt_of(salt: bytes, session: bytes, old: array[int], parts: Sequence[Part], repair: int) -> bytes:
    """The salt of a text that is made of parts of an old one under `salt`, each repaired; see block.edited().

    Tokens of the old one behind the last part don't matter: no part has read them.
    """
    read = old[: parts[-1].old + parts[-1].n]
    spans = array("q", (number for part in parts for number in part))
    return block.edited(salt, session, read.tobytes(), spans.tobytes(), repair)


def parts_of(old: array[int], new: array[int], n: int, least: int, *, gaps: bool = False) -> list[Part]:
    """What the new text says of the old one behind the first n tokens, which both have.

    Each part has at least `least` tokens, and is the next one in the old text, as in llama-server. gaps: the
    new text may say something else between two parts; without, each part follows on the one before it.
    """
    old_bytes, new_bytes, size = old.tobytes(), new.tobytes(), old.itemsize
    parts, at_old, at_new = [], n, n
    lasts: dict[int, int] = {}
    while at_new + least <= len(new):
        begin = _find(old_bytes, new_bytes[at_new * size : (at_new + least) * size], at_old * size, size)
        if begin < 0 and not gaps:
            break
        if begin < 0:
            lasts = lasts or _last_places(old_bytes, least * size, size)
            at_new = _next_known(new_bytes, at_new + 1, least, size, lasts, at_old)
            continue
        n_same = common_length(old_bytes[begin:], new_bytes[at_new * size :])
        parts.append(Part(begin // size, at_new, n_same))
        at_old, at_new = begin // size + n_same, at_new + n_same
    return parts


def anew_of(parts: Sequence[Part], repair: int) -> list[int]:
    """The tokens up to the end of the last part that are to be decoded, by their numbers.

    They are in no part, or the first `repair` ones of a part that is behind a seam.
    """
    anew: list[int] = []
    end = 0
    for part in parts:
        anew += range(end, part.new)
        if part.old or part.new:  # else it begins both texts
            anew += range(part.new, part.new + min(repair, part.n))
        end = part.new + part.n
    return anew


def n_exact_of(n_had: int, anew: Sequence[int]) -> int:
    """How many tokens at the beginning are exact once those of `anew` are decoded. n_had: that are before."""
    for at in anew:
        n_had += at == n_had
    return n_had


def move(kv: KVCache, seq: int, parts: Sequence[Part]) -> None:
    """A sequence that has the old text gets the parts of the new one, each at its new positions.

    Raises what KVCache.seq_rm() and seq_add() raise; the sequence may have anything then.
    """
    end = 0
    for part in parts:
        if part.old > end:
            kv.seq_rm(seq, end, part.old)
        end = part.old + part.n
    kv.seq_rm(seq, end, -1)
    # so that no part comes where another one still is
    down = [part for part in parts if part.new < part.old]
    up = [part for part in reversed(parts) if part.new > part.old]
    for part in (*down, *up):
        kv.seq_add(seq, part.old, part.old + part.n, part.new - part.old)


def n_copied(kv: KVCache, seq: int, parts: Sequence[Part]) -> int:
    """How many empty cells move() needs: parts that move leave those that others have."""
    moved = [part for part in parts if part.new != part.old]
    return sum(kv.seq_count(seq, part.old, part.old + part.n).n_shared for part in moved)


def _find(text: bytes, part: bytes, begin: int, size: int) -> int:
    """Where whole tokens are these; -1: nowhere."""
    at = text.find(part, begin)
    while at >= 0 and at % size:
        at = text.find(part, at + 1)
    return at


def _last_places(text: bytes, n_bytes: int, size: int) -> dict[int, int]:
    """By the hash of what begins at a token: the last token where that is so."""
    return {hash(text[at : at + n_bytes]): at // size for at in range(0, len(text) - n_bytes + 1, size)}


def _next_known(text: bytes, at: int, n: int, size: int, lasts: dict[int, int], least: int) -> int:
    """The first token from `at` on where n tokens begin that `lasts` has at `least` or behind it."""
    end = len(text) // size - n
    while at <= end and lasts.get(hash(text[at * size : (at + n) * size]), -1) < least:
        at += 1
    return at

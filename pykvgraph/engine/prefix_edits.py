"""A text in the cache without some of its tokens: what is behind them moves, and a part of it is repaired."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pykvgraph.checks import integer_rows
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.adapter import Active
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.sequence import edits


class TokenSpan(NamedTuple):
    """The tokens [begin, end) of a text."""

    begin: int
    end: int


class EditedPrefix(NamedTuple):
    """ids: the text that is left. n_cached: how many of its tokens the cache has. n_exact: how many of these
    were made of just the tokens before them, from the first on.
    """

    ids: list[int]
    n_cached: int
    n_exact: int


def checked_spans(spans: Sequence[tuple[int, int]], n: int) -> list[TokenSpan]:
    """In their order.

    Raises InvalidArgumentError for what is no span, and where they overlap, are empty, or leave nothing of n.
    """
    found = sorted(TokenSpan(*span) for span in integer_rows(spans, "spans", TokenSpan._fields))
    ends = [0, *(span.end for span in found)]
    are_apart = all(end <= span.begin < span.end for span, end in zip(found, ends, strict=False))
    if not found or not are_apart:
        raise InvalidArgumentError("spans must have tokens, [begin, end), and not overlap")
    if ends[-1] > n or sum(span.end - span.begin for span in found) >= n:
        raise InvalidArgumentError(f"spans must be within the text's {n} tokens, and leave one")
    return found


def without(ids: array[int], spans: Sequence[TokenSpan]) -> array[int]:
    """The tokens that are left. spans: in their order."""
    left = ids[:]
    for begin, end in reversed(spans):
        del left[begin:end]
    return left


def salt_without(
    salt: bytes, ids: Sequence[int], spans: Sequence[tuple[int, int]], repair: int = edits.REPAIR
) -> bytes:
    """A salt for what Engine.edit_prefix() leaves of a text under `salt`: other edits have others.

    Raises InvalidArgumentError as that does for spans.
    """
    found = np.array(checked_spans(spans, len(ids)), np.int64)
    what = np.array(ids, np.int32).tobytes() + found.tobytes()
    return block.edited(salt, b"", what, repair)


class PrefixEdit:
    """Removes spans of a text that the cache has, between two steps of the engine.

    repair: tokens behind each that are decoded again. into: the salt under which the index keeps what is not
    exact. Raises InvalidArgumentError for more tokens to decode than a batch has.
    """

    def __init__(
        self, ctx: Context, ids: array[int], spans: list[TokenSpan], repair: int, into: bytes, active: Active
    ) -> None:
        if repair * len(spans) > ctx.n_batch:
            raise InvalidArgumentError(
                f"repair: {repair} tokens behind each of {len(spans)} spans are more than a batch of "
                f"{ctx.n_batch}, for which others would wait: repair fewer"
            )
        self._ctx = ctx
        self._ids = ids
        self._spans = spans
        self._repair = repair
        self._into = into
        self._active = active

    def run(self, index: PrefixIndex, seq: int, salt: bytes) -> EditedPrefix:
        """With an empty sequence. Raises what Sequence.remove() and repair() raise."""
        left = without(self._ids, self._spans)
        found = index.find(self._ids, len(self._ids), salt)
        spans = [TokenSpan(begin, min(end, found.n)) for begin, end in self._spans if begin < found.n]
        if not spans:  # what is left in the cells is the beginning, as it was
            return EditedPrefix(list(left), found.n, found.n)
        n_moved = found.n - spans[0].end
        last = index.attach(found, seq)
        try:
            index.make_room(n_moved + min(self._repair * len(spans), n_moved))
            n, n_exact = self._edit(seq, spans, found.n)
            if n:
                if n_exact == n:
                    index.keep(left, n, seq, salt)
                else:
                    index.keep(left, n, seq, self._into, min(n_exact, last.root.n_exact))
        finally:
            index.unpin(last)
        return EditedPrefix(list(left), n, n_exact)

    def _edit(self, seq: int, spans: list[TokenSpan], n: int) -> tuple[int, int]:
        """How many tokens are left in the sequence, and how many of these are exact."""
        self._ctx.set_adapters(self._active)
        text = edits.Sequence(self._ctx, seq)
        text.record(self._ids[:n])
        n_gone = 0
        for begin, end in reversed(spans):
            text.remove(begin, end, 0)
        seams = []
        for begin, end in spans:
            at = begin - n_gone
            n_gone += end - begin
            seams.append((at, min(at + self._repair, len(text))))
        text.repair(seams)
        n_exact = text.approximate_from
        return len(text), len(text) if n_exact is None else n_exact

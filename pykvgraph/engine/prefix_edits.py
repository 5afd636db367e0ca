"""A text in the cache without some of its tokens: what is behind them moves, and a part of it is repaired."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.checks import integer_rows
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.engine.moved_parts import Part, anew_of, move, n_exact_of, salt_of
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.adapter import Active
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.sequence.edits import REPAIR


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


def parts_left(spans: Sequence[TokenSpan], n: int) -> list[Part]:
    """What is left of a text's first n tokens. spans: in their order."""
    begins, ends = [0, *(span.end for span in spans)], [*(span.begin for span in spans), n]
    parts, new = list[Part](), 0
    for begin, end in zip(begins, ends, strict=True):
        if (n_left := min(end, n) - begin) > 0:
            parts.append(Part(begin, new, n_left))
            new += n_left
    return parts


def salt_without(
    salt: bytes, ids: Sequence[int], spans: Sequence[tuple[int, int]], repair: int = REPAIR
) -> bytes:
    """A salt for what Engine.edit_prefix() leaves of a text under `salt`: other edits have others.

    Raises InvalidArgumentError as that does for spans.
    """
    parts = parts_left(checked_spans(spans, len(ids)), len(ids))
    return salt_of(salt, b"", array("i", ids), parts, repair)


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
        """With an empty sequence. Raises what moved_parts.move() and Context.decode() raise."""
        left = array("i")
        for part in parts_left(self._spans, len(self._ids)):
            left += self._ids[part.old : part.old + part.n]
        found = index.find(self._ids, len(self._ids), salt)
        parts = parts_left(self._spans, found.n)
        n = sum(part.n for part in parts)
        n_had = parts[0].n if parts and parts[0].old == 0 else 0
        anew = anew_of(parts, self._repair)
        # the text that is edited may be what an earlier edit left
        n_exact = n_exact_of(min(n_had, found.match.root.n_exact), anew)
        if n_had == n == n_exact:  # what is left in the cells is the beginning, as it was
            return EditedPrefix(list(left), n, n)
        last = index.attach(found, seq)
        try:
            index.make_room(n - n_had + len(anew))
            move(self._ctx.kv, seq, parts)
            self._decode(left, anew, seq)
            if n_exact == n:
                index.keep(left, n, seq, salt)
            else:
                index.keep(left, n, seq, self._into, n_exact)
        finally:
            index.unpin(last)
        return EditedPrefix(list(left), n, n_exact)

    def _decode(self, left: array[int], anew: list[int], seq: int) -> None:
        batch = Batch()
        for at in anew:
            batch.add(left[at], at, (seq,))
        if anew:
            self._ctx.set_adapters(self._active)
            self._ctx.decode(batch, repair=True)

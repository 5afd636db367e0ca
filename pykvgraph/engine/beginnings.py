"""What texts begin with alike: where they part, and whether another one is about to decode it."""

from __future__ import annotations

from collections.abc import Sequence

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.prefix import block

_MOST_PARTINGS = 8  # of a text


def mark_partings(first: Sequence[RequestSequence], running: Sequence[RequestSequence]) -> None:
    """Of those who are to enter soon and were not yet compared with others."""
    known = [*running, *(each for each in first if each.is_compared)]
    for new in first:
        if not new.is_compared:
            _mark_parting(new, known)
            new.is_compared = True
            known.append(new)


def _mark_parting(new: RequestSequence, known: Sequence[RequestSequence]) -> None:
    """Where the text parts from others, a point is worth having: more are likely to part there."""
    for other in known:
        n = common_length(new.ids, other.ids)
        if n < block.N_TOKENS or other.salt != new.salt:
            continue
        for sequence in (new, other):
            near = any(abs(place - n) < block.N_TOKENS for place in (sequence.n_decoded, *sequence.places))
            if not near and len(sequence.places) < _MOST_PARTINGS:
                sequence.add_place(n)


def is_coming(
    sequence: RequestSequence, n: int, running: Sequence[RequestSequence], needs_points: bool
) -> bool:
    """Whether a running text is about to decode more of what both begin with: worth waiting for.

    n: tokens that the cache has of it. needs_points: whether it can go on from resume points only.
    """
    for other in running:
        if other.decodes or other.salt != sequence.salt:
            continue
        common = min(common_length(sequence.ids, other.ids), sequence.n_findable)
        if common - n < block.N_TOKENS:
            continue
        if needs_points:
            if any(n + block.N_TOKENS <= place <= common for place in other.places):
                return True
        elif other.n_decoded < min(-(-common // block.N_TOKENS) * block.N_TOKENS, len(other.ids)):
            return True
    return False

"""Which tokens of a text share composite cells, and stay or go as a whole."""

from __future__ import annotations

import numpy as np

from pykvgraph.context.context import Context
from pykvgraph.sequence.tokens import DecodedTokens


def composite_spans(ctx: Context, seq: int, tokens: DecodedTokens) -> list[range]:
    """The tokens of each span of composite cells, which stand at the position of its last token.

    Those that are known (DecodedTokens.composites), less those that are gone, and those that something else
    composed before the text was recorded: there are more or fewer cells at a position than tokens.
    """
    kv = ctx.kv
    full = [index for index, group in enumerate(kv.groups) if group.kind == "full"]
    if not full or tokens.n_shareable == tokens.n_decoded:
        tokens.composites = []
        return []
    view = kv.cells(full[0])
    found, counts = np.unique(view.pos[view.seq[:, seq]], return_counts=True)
    several = {tokens.positions.first_at(int(found[i]) + 1): i for i in np.flatnonzero(counts > 1).tolist()}
    tokens.composites = [span for span in tokens.composites if span.stop in several]
    spans = {span.stop: span for span in tokens.composites}
    for end, i in several.items():
        if end not in spans and counts[i] != end - tokens.positions.first_at(int(found[i])):
            first = tokens.positions.first_at(int(found[i - 1]) + 1 if i else 0)
            spans[end] = range(first, end)
    return [spans[end] for end in sorted(spans)]

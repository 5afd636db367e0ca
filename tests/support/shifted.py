"""What a text says that gives up its oldest tokens, decoded by hand."""

from __future__ import annotations

import numpy as np

import pykvgraph as kvg
from support.soak import F32


def follows_alone(
    model: kvg.Model, prompt: list[int], said: list[int], n_ctx: int, n_keep: int, n_discard: int
) -> int:
    """How many shifts it takes, in a context of its own; each token must be the likeliest, up to rounding."""
    n_shifts = 0
    with kvg.Context(model, n_ctx=2 * n_ctx, **F32) as ctx:
        batch = kvg.Batch()
        batch.extend(prompt, 0)
        ctx.decode(batch)
        for token in said:
            logits = ctx.logits()[-1]
            assert logits.max() - logits[token] <= 1e-3 * np.ptp(logits)
            n = ctx.kv.seq_pos_max(0) + 1
            if n + 1 >= n_ctx:
                gone = n_discard or (n - n_keep) // 2
                ctx.kv.seq_rm(0, n_keep, n_keep + gone)
                ctx.kv.seq_add(0, n_keep + gone, -1, -gone)
                n -= gone
                n_shifts += 1
            batch.clear()
            batch.extend([token], n)
            ctx.decode(batch)
    return n_shifts

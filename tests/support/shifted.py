"""What a text says that gives up tokens whenever it is full, decoded by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import pykvgraph as kvg
from support.soak import F32


def follows_alone(
    model: kvg.Model,
    prompt: list[int],
    said: list[int],
    n_ctx: int,
    give_up: Callable[[kvg.Context, int], int],
) -> int:
    """How often it gives up tokens, in a context of its own; each must be the likeliest, up to rounding.

    A prompt that is longer than n_ctx is read in parts that fill it.
    give_up(ctx, n): gives up some of the n tokens of sequence 0, closes the gaps, and returns how many.
    """
    n_times = 0
    with kvg.Context(model, n_ctx=2 * n_ctx, swa_full=True, **F32) as ctx:
        batch = kvg.Batch()

        def decode(tokens: list[int]) -> None:
            nonlocal n_times
            while tokens:
                n = ctx.kv.seq_pos_max(0) + 1
                if n + 1 >= n_ctx:
                    n -= give_up(ctx, n)
                    n_times += 1
                part, tokens = tokens[: n_ctx - 1 - n], tokens[n_ctx - 1 - n :]
                batch.clear()
                batch.extend(part, n)
                ctx.decode(batch)

        decode(prompt)
        for token in said:
            logits = ctx.logits()[-1]
            assert logits.max() - logits[token] <= 1e-3 * np.ptp(logits)
            decode([token])
    return n_times


def oldest(n_keep: int, n_discard: int) -> Callable[[kvg.Context, int], int]:
    """Those behind the first n_keep: n_discard of them; 0: half."""

    def give_up(ctx: kvg.Context, n: int) -> int:
        gone = n_discard or (n - n_keep) // 2
        ctx.kv.seq_rm(0, n_keep, n_keep + gone)
        ctx.kv.seq_add(0, n_keep + gone, -1, -gone)
        return gone

    return give_up

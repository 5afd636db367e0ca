"""A context at its largest: every graph that it may keep is there, as large as it can be."""

from __future__ import annotations

import pykvgraph as kvg
from support.engines import decode, random_ids, run_of
from support.models import N_VOCAB

SMALL = 32  # tokens of the largest graph that is kept beside the one of a whole micro-batch
N_KEPT = 8


def grow_graphs(ctx: kvg.Context, n_before: int = 0, n_outputs: int = SMALL) -> None:
    """Decodes a whole batch, then small ones. n_outputs: how many tokens of each ask for logits.

    n_before: how many tokens stay in the cache before them: on some devices a graph is as large as the span
    that is attended. One more shape than are kept takes the place of each graph in turn.
    """
    ctx.reset()
    for begin in range(0, n_before, ctx.n_batch):
        decode_run(ctx, begin, min(ctx.n_batch, n_before - begin), n_outputs=0)
    states = ctx.kv.save(0) if n_before and ctx.kv.groups[-1].kind == "state" else None
    small = min(SMALL, ctx.n_ubatch)
    for size in [ctx.n_batch, *[small, *range(1, N_KEPT + 1)] * N_KEPT]:
        if n_before and states is None:
            ctx.kv.seq_rm(0, n_before, -1)
        else:
            ctx.reset()
        if states is not None:  # they can't go back
            ctx.kv.load(states, seq=0)
        n = min(size, ctx.n_batch, ctx.n_ctx - n_before)
        decode_run(ctx, n_before, n, n_outputs)


def decode_run(ctx: kvg.Context, begin: int, n: int, n_outputs: int) -> None:
    tokens = run_of(random_ids(n, N_VOCAB), begin)
    decode(ctx, [token._replace(logits=i < n_outputs) for i, token in enumerate(tokens)])

"""A context at its largest: every graph that it may keep is there, as large as it can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pykvgraph as kvg
from support.engines import random_ids
from support.models import N_VOCAB

SMALL = 32  # tokens of the largest graph that is kept beside the one of a whole micro-batch
N_KEPT = 8
# as many other shapes, of few tokens: n, and whether these ask for logits
OTHERS = [(n, logits) for n in range(1, N_KEPT // 2 + 1) for logits in (True, False)]


def grow_graphs(ctx: kvg.Context, before: int | bytes = 0, n_outputs: int = SMALL) -> None:
    """Decodes a whole batch, then small ones. n_outputs: how many tokens at most ask for logits.

    before: how many tokens stay in the cache before them, or what `saved_by_cpu` returned: on some devices a
    graph is as large as the span that is attended. One more shape than are kept takes the place of each graph
    in turn.
    """
    ctx.reset()
    if isinstance(before, bytes):
        ctx.kv.load(before, seq=0)
    else:
        decode_before(ctx, before)
    n_before = ctx.kv.seq_pos_max(0) + 1
    states = ctx.kv.save(0) if n_before and ctx.kv.groups[-1].kind == "state" else None
    small = min(SMALL, ctx.n_ubatch)
    for size, logits in [(ctx.n_batch, True), *[(small, True), *OTHERS] * N_KEPT]:
        if n_before and states is None:
            ctx.kv.seq_rm(0, n_before, -1)
        else:
            ctx.reset()
        if states is not None:  # they can't go back
            ctx.kv.load(states, seq=0)
        n = min(size, ctx.n_batch, ctx.n_ctx - n_before)
        decode_run(ctx, n_before, n, n_outputs if logits else 0, is_cut=n > 1 and keeps_states(ctx))


def saved_by_cpu(path: Path, n: int, **options: Any) -> bytes:
    """n tokens of sequence 0, for a context with these options: software devices take their time for them."""
    with kvg.Model(path, device="cpu") as model, kvg.Context(model, **options) as ctx:
        decode_before(ctx, n)
        return ctx.kv.save(0)


def decode_before(ctx: kvg.Context, n: int) -> None:
    for begin in range(0, n, ctx.n_batch):
        decode_run(ctx, begin, min(ctx.n_batch, n - begin), n_outputs=0)


def keeps_states(ctx: kvg.Context) -> bool:
    states = ctx.kv.groups[-1]
    return states.kind == "state" and states.n_cells > 2 * ctx.n_seq_max


def decode_run(ctx: kvg.Context, begin: int, n: int, n_outputs: int, is_cut: bool = False) -> None:
    """is_cut: with a checkpoint before the last token, so that states on a device are in more graphs."""
    batch = kvg.Batch()
    for i, token in enumerate(random_ids(n, N_VOCAB)):
        batch.add(token, begin + i, logits=i < n_outputs, checkpoint=is_cut and i == n - 2)
    ctx.decode(batch)

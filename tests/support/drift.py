"""What repeated K-shifts cost, in roundings of the cache's type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import pykvgraph as kvg
from support.engines import decode, open_context, random_ids, run_of
from support.kv_rows import Rows, cells_at, fresh_k
from support.models import N_VOCAB

P0, N_TOKENS = 1000, 40  # fewer than may wait: every shift rotates


def rms(values: Rows) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def drifts(
    model: kvg.Model, deltas: Sequence[int], *, n_updates: int = 100, reload: bool = False, **options: Any
) -> Iterator[tuple[int, float]]:
    """(n, error of K after n updates, as a multiple of what writing it costs) for some n up to n_updates.

    deltas: of the updates, by turns; reload: before each the cells are saved and come into an empty cache.
    The judge is a fresh cache in F32 at the new positions, of layer 0.
    """
    tokens = run_of(random_ids(N_TOKENS, N_VOCAB), P0)
    with (
        open_context(model, n_ctx=64, type_k="f32") as exact,
        open_context(model, n_ctx=64, **options) as fresh,
        open_context(model, n_ctx=64, **options) as ctx,
    ):
        decode(ctx, tokens)
        there = tokens
        for n in range(1, n_updates + 1):
            delta = deltas[(n - 1) % len(deltas)]
            there = [token._replace(pos=token.pos + delta) for token in there]
            if reload:
                blob = ctx.kv.save()
                ctx.reset()
                ctx.kv.load(blob)
            ctx.kv.seq_add(0, 0, -1, delta)
            assert ctx.kv.update().shifted_cells == N_TOKENS
            if n in (1, 2, 10, 100, n_updates):
                true = fresh_k(exact, there)
                own = rms(fresh_k(fresh, there) - true)
                k = ctx.kv.read_k(0)[cells_at(ctx.kv, [token.pos for token in there])]
                yield n, rms(k - true) / own

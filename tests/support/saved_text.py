"""A cache with text in it, to be saved and loaded, and what must be the same afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import pykvgraph as kvg
from support.engines import Token, decode, random_ids, run_of
from support.kv_rows import Contents, contents, same_cells
from support.models import N_VOCAB

# plain attention: flash adds up F16 values in the order of the cells
OPTIONS = {"n_ctx": 96, "n_seq_max": 4, "defrag_threshold": -1, "flash_attn": "off"}
Refusals = type[Exception] | tuple[type[Exception], ...]


def populate(ctx: kvg.Context) -> None:
    """Twelve tokens that 0 and 1 share, twenty more of 0, ten of 1, six of 2; then holes in all of them."""
    decode(ctx, run_of(random_ids(12, N_VOCAB), 0, (0, 1)))
    for seq, (n, p0) in enumerate([(20, 12), (10, 12), (6, 0)]):
        decode(ctx, run_of(random_ids(n, N_VOCAB, 1 + seq), p0, (seq,)))
    for p0 in (3, 14, 17):
        ctx.kv.seq_rm(-1, p0, p0 + 2)


def following(kv: kvg.KVCache, seq: int) -> list[Token]:
    """Eight more tokens of a sequence, with logits."""
    return run_of(random_ids(8, N_VOCAB, 50 + seq), kv.seq_pos_max(seq) + 1, (seq,))


def held(ctx: kvg.Context) -> list[Contents]:
    """What each sequence sees: positions, K and V. A pending shift runs first."""
    return [contents(ctx.kv, seq) for seq in range(ctx.kv.n_seq_max)]


def all_cells(ctx: kvg.Context) -> list[kvg.CellsView]:
    return [ctx.kv.cells(group) for group in range(len(ctx.kv.groups))]


def refused(ctx: kvg.Context, error: Refusals, call: Callable[[], object], match: str | None = None) -> None:
    """The call raises, and neither cells nor K and V have changed."""
    contents_before, before = held(ctx), all_cells(ctx)
    with pytest.raises(error, match=match):
        call()
    assert all(map(same_cells, all_cells(ctx), before))
    assert held(ctx) == contents_before

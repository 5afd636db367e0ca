"""What the cache tells of itself, besides its cells."""

from __future__ import annotations

import numpy as np
import pytest
from support.engines import Token, decode, open_context, random_ids, run_of
from support.models import N_VOCAB

import pykvgraph as kvg


def test_sizes(small: kvg.Model) -> None:
    with open_context(small, n_ctx=100, n_seq_max=3, type_k="f32", type_v="f16") as ctx:
        kv = ctx.kv
        assert (kv.n_cells, kv.n_used, kv.n_free, kv.n_kv, kv.n_seq_max) == (100, 0, 100, 0, 3)
        assert kv.can_shift
        assert kv.read_k(0).shape == kv.read_v(1).shape == (100, small.n_head_kv, small.head_dim)
        assert kv.read_k(0).dtype == np.float32
        cells = kv.cells()
        assert (cells.pos.shape, cells.seq.shape, cells.shift.shape) == ((100,), (100, 3), (100,))
        assert [str(a.dtype) for a in (cells.pos, cells.seq, cells.shift)] == ["int32", "bool", "int32"]
        # 4 bytes of K and 2 of V; rows may be padded, not doubled
        row = small.n_layer * small.n_head_kv * small.head_dim * (4 + 2)
        assert 100 * row <= kv.bytes <= 356 * row
        decode(ctx, run_of([5, 6, 7]))
        assert kv.groups == (
            kvg.CellGroup("full", (0, 1), n_cells=100, window=0, n_used=3, n_kv=3, cell_bytes=row),
        )
        assert kv.n_free == 97
        with pytest.raises(kvg.InvalidArgumentError):
            kv.cells(group=1)


def test_snapshot_stays_what_it_was(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of([5, 6, 7]))
        cells, k = ctx.kv.cells(), ctx.kv.read_k(0)
        held = cells.pos.copy(), k.copy()
        ctx.kv.seq_add(0, 0, -1, 9)
        ctx.kv.update()
        assert np.array_equal(cells.pos, held[0])
        assert np.array_equal(k, held[1])


@pytest.mark.parametrize("data", [False, True])
def test_clear(small: kvg.Model, data: bool) -> None:
    with open_context(small, n_ctx=64) as ctx:
        expected = decode(ctx, run_of(random_ids(20, N_VOCAB)))
        ctx.kv.seq_add(0, 0, -1, 5)
        ctx.kv.defrag("fill")
        ctx.kv.clear(data)
        cells = ctx.kv.cells()
        assert (ctx.kv.n_used, ctx.kv.n_kv, ctx.kv.seq_pos_max(0)) == (0, 0, -1)
        assert set(cells.pos) == {-1}
        assert not cells.seq.any()
        assert not cells.shift.any()
        assert ctx.kv.update().graphs == 0
        for layer in range(small.n_layer):
            assert not ctx.kv.read_k(layer).any()
            assert not ctx.kv.read_v(layer).any()
        assert np.array_equal(decode(ctx, run_of(random_ids(20, N_VOCAB))), expected)


def test_attention_spans_the_sequences_own_cells(small: kvg.Model) -> None:
    """Neither idle sequences nor the empty rest of the cache cost anything, but for padding at both ends."""
    with open_context(small, n_ctx=2048, n_batch=1024, n_seq_max=3, defrag_threshold=-1) as ctx:
        decode(ctx, run_of(random_ids(700, N_VOCAB)))
        decode(ctx, run_of(random_ids(40, N_VOCAB), 0, (1,)))
        decode(ctx, run_of(random_ids(700, N_VOCAB), 0, (2,)))
        decode(ctx, [Token(5, 700)])
        # the last token's cell is the farthest
        assert 700 < ctx.kv.n_attended <= ctx.kv.n_kv + 256
        ctx.kv.seq_rm(0, 700, -1)
        ctx.kv.seq_rm(2, 0, -1)
        decode(ctx, [Token(5, 40, (1,))])
        assert 41 <= ctx.kv.n_attended <= 41 + 2 * 256 < 700


def test_stats_of_what_decode_did_by_itself(small: kvg.Model) -> None:
    with open_context(small, n_ctx=128) as ctx:
        decode(ctx, run_of(random_ids(60, N_VOCAB)))
        assert ctx.kv.take_stats().graphs == 0
        ctx.kv.seq_rm(0, 10, 30)
        ctx.kv.seq_add(0, 30, -1, -20)
        decode(ctx, [Token(5, 40)])
        stats = ctx.kv.take_stats()
        assert (stats.shifted_cells, stats.moved_cells) == (30, 20)
        assert stats.graphs >= 2
        assert stats.moved_bytes == 20 * small.n_layer * small.n_head_kv * small.head_dim * (2 + 2)
        again = ctx.kv.take_stats()
        assert (again.shifted_cells, again.moved_cells, again.graphs) == (0, 0, 0)

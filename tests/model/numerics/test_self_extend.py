"""seq_div: K at a divided position is K as it would have been there.

libllama rotates it in the wrong direction.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.engines import Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import allowed_drift, cells_at, fresh_k, same_cells
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

N = 64
SPECS = [
    SMALL,
    ModelSpec(n_layer=1, n_embd=64, n_head=8, n_head_kv=4, rope_factors=True, seed=1),
    ModelSpec(n_layer=1, n_embd=128, n_head=4, n_head_kv=1, rope_scale=2.0, seed=2),
]


def spread(tokens: list[Token], n_seq: int) -> list[Token]:
    """The same tokens over n_seq sequences, in turn: so equal positions can be decoded in one batch."""
    return [token._replace(seq_ids=(i % n_seq,)) for i, token in enumerate(tokens)]


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("divisor", [2, 4, 7])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_k_is_fresh_k_at_the_divided_position(
    model_file: Callable[[ModelSpec], Path], spec: ModelSpec, divisor: int, kv_type: str
) -> None:
    tokens = run_of(random_ids(N, N_VOCAB), 100)
    divided = [token._replace(pos=token.pos // divisor) for token in tokens]
    with (
        kvg.Model(model_file(spec), device=where.device) as model,
        open_context(model, n_ctx=N, n_seq_max=divisor, type_k=kv_type) as ctx,
    ):
        fresh = fresh_k(ctx, spread(divided, divisor))
        ctx.reset()
        decode(ctx, tokens)
        places = cells_at(ctx.kv, [token.pos for token in tokens])
        ctx.kv.seq_div(0, -1, -1, divisor)
        cells = ctx.kv.cells()
        assert list(cells.pos[places]) == [token.pos for token in divided]
        assert list(cells.shift[places]) == [token.pos // divisor - token.pos for token in tokens]
        assert ctx.kv.update().shifted_cells == N
        k = ctx.kv.read_k(0)[places]
    assert np.abs(k - fresh).max() <= allowed_drift(fresh, kv_type, 100 + N)


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_self_extend_while_decoding(small: kvg.Model, kv_type: str) -> None:
    """As llama.cpp's passkey example does it: each block is moved to where it would be, and divided there."""
    n_group, block = 4, 16
    ids = random_ids(N, N_VOCAB)
    places = []
    with open_context(small, n_ctx=N, n_seq_max=n_group, type_k=kv_type) as ctx:
        for i in range(N // block):
            first = ctx.kv.seq_pos_max(0) + 1
            decode(ctx, run_of(ids[i * block : (i + 1) * block], first))
            places += cells_at(ctx.kv, range(first, first + block))
            behind = i * block - first  # positions that the earlier blocks gave up
            ctx.kv.seq_add(0, first, first + block, behind)
            ctx.kv.seq_div(0, first + behind, first + behind + block, n_group)
        assert list(ctx.kv.cells().pos[places]) == [i // n_group for i in range(N)]
        k = ctx.kv.read_k(0)[places]
        fresh = fresh_k(ctx, spread([Token(token, i // n_group) for i, token in enumerate(ids)], n_group))
    assert np.abs(k - fresh).max() <= allowed_drift(fresh, kv_type, 2 * N)


def test_divided_text_reads_as_one_decoded_there(model_file: Callable[[ModelSpec], Path]) -> None:
    """With one layer, where V doesn't depend on positions, the next token's logits are the same too."""
    tokens = run_of(random_ids(24, N_VOCAB))
    there = [token._replace(pos=token.pos // 2) for token in tokens]
    with (
        kvg.Model(model_file(ModelSpec(n_layer=1)), device=where.device) as model,
        open_context(model, n_ctx=64, n_seq_max=2, type_k="f32", type_v="f32") as ctx,
    ):
        decode(ctx, spread(there, 2))
        ctx.kv.seq_cp(1, 0, -1, -1)
        expected = decode(ctx, [Token(5, 12)])
        ctx.reset()
        decode(ctx, tokens)
        ctx.kv.seq_div(0, -1, -1, 2)
        divided = decode(ctx, [Token(5, 12)])
        ctx.reset()
        decode(ctx, tokens)
        undivided = decode(ctx, [Token(5, 24)])
    assert nmse(divided, expected) <= where.limit(1e-6)
    assert nmse(undivided, expected) > 1e-3


def test_division_by_one_is_nothing(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of(random_ids(20, N_VOCAB)))
        ctx.kv.seq_div(0, -1, -1, 1)
        assert ctx.kv.update().shifted_cells == 0


def test_self_extend_to_the_largest_number(small: kvg.Model) -> None:
    """Positions are refused before anything is changed, or not at all."""
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of(random_ids(20, N_VOCAB)))
        assert kvg.self_extend(ctx.kv, 0, 1, 2**63 - 1, 2) == 1 + 10
        assert sorted(ctx.kv.cells().pos[:20]) == [0, *(1 + j // 2 for j in range(19))]
        before = ctx.kv.cells()
        for n_grp in (2**31, 2**63 - 1):
            with pytest.raises(kvg.InvalidArgumentError):
                kvg.self_extend(ctx.kv, 0, 1, 2**63 - 1, n_grp)
            assert same_cells(ctx.kv.cells(), before)

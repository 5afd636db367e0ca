"""Two groups of cells whose rows differ in width: each operation in both, or in none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.engines import Engine, Logits, decode, open_context, prompt_then_singles, random_ids, run_of
from support.judge import judge, nmse
from support.models import N_VOCAB, TWO_GROUPS, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

IDS = random_ids(80, N_VOCAB)
# the same weights under the name of an architecture whose layers may differ for libllama, too
FOR_LIBLLAMA = replace(TWO_GROUPS, arch="deci")


@pytest.fixture(scope="module")
def model(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(model_file(TWO_GROUPS), device=where.device) as opened:
        yield opened


def test_layers_with_alike_rows_share_cells(model: kvg.Model) -> None:
    assert [(layer.group, layer.n_head_kv) for layer in model.layers] == [(0, 2), (1, 4), (0, 2)]
    with open_context(model, n_ctx=100, type_k="f32", type_v="f16") as ctx:
        decode(ctx, run_of(IDS[:3]))
        assert [(group.kind, group.layers, group.n_used) for group in ctx.kv.groups] == [
            ("full", (0, 2), 3),
            ("full", (1,), 3),
        ]
        assert [ctx.kv.read_k(layer).shape[1] for layer in range(3)] == [2, 4, 2]
        # 8 heads in all, 4 bytes of K and 2 of V; rows are padded to 256
        assert ctx.kv.bytes == 256 * 8 * model.head_dim * (4 + 2)
        with pytest.raises(kvg.InvalidArgumentError, match="group"):
            ctx.kv.cells(group=2)


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_logits_are_libllamas(model_file: Callable[[ModelSpec], Path], kv_type: str) -> None:
    def moved(engine: Engine) -> Logits:
        rows = [prompt_then_singles(engine, IDS[:60], 40)]
        engine.seq_rm(0, 10, 25)
        engine.seq_add(0, 25, -1, -15)
        rows.append(engine.decode(run_of(IDS[60:], 45)))
        return np.concatenate(rows)

    judge(model_file(TWO_GROUPS), moved, referee=model_file(FOR_LIBLLAMA), kv_type=kv_type)


@pytest.mark.parametrize("policy", ["fill", "sort"])
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_sharing_copies_and_defrag_are_a_fresh_context(model: kvg.Model, kv_type: str, policy: str) -> None:
    types = {"type_k": kv_type, "type_v": kv_type}
    with open_context(model, n_ctx=128, n_seq_max=2, **types) as ctx:
        decode(ctx, run_of(IDS[:40]))
        ctx.kv.seq_cp(0, 1, 0, -1)
        ctx.kv.seq_rm(0, 5, 12)
        ctx.kv.seq_add(1, 20, -1, 7)  # copies in both groups
        ctx.kv.seq_rm(0, 30, -1)
        ctx.kv.defrag("sort" if policy == "sort" else "fill")
        stats = ctx.kv.update()
        assert stats.moved_cells > 0
        assert [group.n_kv for group in ctx.kv.groups] == [group.n_used for group in ctx.kv.groups]
        assert np.array_equal(ctx.kv.cells(0).pos, ctx.kv.cells(1).pos)
        logits = decode(ctx, run_of(IDS[40:50], 60, (1,)))
    with open_context(model, n_ctx=128, **types) as fresh:
        decode(fresh, [*run_of(IDS[:20]), *run_of(IDS[20:40], 20)])
        fresh.kv.seq_add(0, 20, -1, 7)
        fresh.kv.update()
        assert nmse(logits, decode(fresh, run_of(IDS[40:50], 60))) <= where.rule(1e-6)


def test_a_full_cache_changes_no_group(model: kvg.Model) -> None:
    with open_context(model, n_ctx=32, n_seq_max=2) as ctx:
        decode(ctx, run_of(IDS[:20]))
        ctx.kv.seq_cp(0, 1, 0, -1)
        before = [ctx.kv.cells(group) for group in range(2)]
        with pytest.raises(kvg.CacheFullError):
            decode(ctx, run_of(IDS[20:40], 20))
        with pytest.raises(kvg.CacheFullError):
            ctx.kv.seq_add(0, 5, -1, 3)  # 15 copies, 12 empty cells
        for group, view in enumerate(before):
            assert np.array_equal(ctx.kv.cells(group).pos, view.pos)
            assert np.array_equal(ctx.kv.cells(group).seq, view.seq)

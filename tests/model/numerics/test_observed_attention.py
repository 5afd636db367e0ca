"""What observed tokens attend to, beside a llama by its definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import naive_scores
from support.architectures import ArchSpec
from support.engines import batch_of, open_context, random_ids, run_of
from support.faults import fault
from support.models import N_VOCAB, SMALL, TWO_GROUPS, ModelSpec
from support.naive_llama import Floats, naive_logits
from support.naive_scores import cells_of

import pykvgraph as kvg

N = 150
IDS = random_ids(N, N_VOCAB)
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_batch": 200, "type_k": "f32", "type_v": "f32"}


def attended(spec: ModelSpec, ids: list[int]) -> list[Floats]:
    layers: list[Floats] = []
    naive_logits(spec, ids, layers)
    return layers


def shares(ctx: kvg.Context, group: int = 0) -> Floats:
    """By position."""
    of_cells = ctx.attention(group)
    assert of_cells.shape == (ctx.kv.groups[group].n_cells,)
    cells = [cell for _, cell in cells_of(ctx, group)]
    assert of_cells.sum() == pytest.approx(of_cells[cells].sum(), abs=1e-6)  # others get nothing
    return of_cells[cells].astype(np.float64)


@pytest.mark.parametrize("spec", [SMALL, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize(
    ("n_observed", "n_ubatch", "n_threads"), [(1, 512, 1), (64, 512, 2), (64, 24, 1), (N, 40, 2)]
)
def test_by_the_definition(
    model_file: Callable[[ModelSpec], Path], spec: ModelSpec, n_observed: int, n_ubatch: int, n_threads: int
) -> None:
    """Blocks of 16 tokens, micro-batches and threads end anywhere; holes get nothing."""
    layers = attended(spec, IDS)
    options = {**OPTIONS, "n_ubatch": n_ubatch, "n_threads": n_threads, "n_threads_batch": n_threads}
    with kvg.Model(model_file(spec), device="cpu") as model, open_context(model, **options) as ctx:
        ctx.decode(batch_of(run_of(IDS[:70])))
        ctx.kv.seq_rm(0, 20, 70)
        silent = [token._replace(logits=False) for token in run_of(IDS[20:], 20)]
        ctx.decode(batch_of(silent), observe=min(n_observed, N - 20))
        for index, group in enumerate(ctx.kv.groups):
            expected = naive_scores.attention([layers[i] for i in group.layers], min(n_observed, N - 20))
            assert shares(ctx, index) == pytest.approx(expected, abs=5e-6)
            cells = [cell for _, cell in cells_of(ctx, index)]
            heads = ctx.attention_of_heads(index)
            assert heads.shape == (len(group.layers), heads.shape[1], ctx.kv.groups[index].n_cells)
            for place, layer in enumerate(group.layers):
                for head, queries in enumerate(np.split(layers[layer], spec.heads_of(layer))):
                    expected = naive_scores.attention([queries], min(n_observed, N - 20))
                    assert heads[place, head][cells] == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize(
    ("n_observed", "n_ubatch", "n_threads"), [(1, 512, 1), (64, 512, 2), (64, 24, 1), (N, 40, 2)]
)
def test_peaks_by_the_definition(
    model_file: Callable[[ModelSpec], Path], n_observed: int, n_ubatch: int, n_threads: int
) -> None:
    """The highest share of any of these tokens, by any query head of each KV head; shares are untold then."""
    layers = attended(SMALL, IDS)
    options = {**OPTIONS, "n_ubatch": n_ubatch, "n_threads": n_threads, "n_threads_batch": n_threads}
    with kvg.Model(model_file(SMALL), device="cpu") as model, open_context(model, **options) as ctx:
        ctx.decode(batch_of(run_of(IDS[:70])))
        with pytest.raises(kvg.InvalidArgumentError, match="observed no token"):
            ctx.attention_of_heads(0)
        ctx.kv.seq_rm(0, 20, 70)
        ctx.decode(batch_of(run_of(IDS[20:], 20)), observe=min(n_observed, N - 20), peaks=True)
        cells = [cell for _, cell in cells_of(ctx)]
        peaks = ctx.attention_of_heads(0)
        for found, shares in zip(peaks, layers, strict=True):
            rows = shares[:, -min(n_observed, N - 20) :].max(axis=1)  # (n_head, n)
            expected = rows.reshape(SMALL.n_head_kv, -1, N).max(axis=1)
            assert found[:, cells] == pytest.approx(expected, abs=5e-6)
            found[:, cells] = 0
            assert not found.any()
        with pytest.raises(kvg.InvalidArgumentError, match="have no mean"):
            ctx.attention()


def test_many_cells_for_one_token(model_file: Callable[[ModelSpec], Path]) -> None:
    """Cells in several ranges, which threads work on by themselves."""
    ids = random_ids(700, N_VOCAB)
    expected = naive_scores.attention(attended(SMALL, ids), 1)
    options = {**OPTIONS, "n_ctx": 800, "n_batch": 800, "n_threads": 2}
    with kvg.Model(model_file(SMALL), device="cpu") as model, open_context(model, **options) as ctx:
        ctx.decode(batch_of(run_of(ids[:-1])))
        ctx.decode(batch_of(run_of(ids[-1:], len(ids) - 1)), observe=1)
        assert shares(ctx) == pytest.approx(expected, abs=5e-6)


def test_sinks_take_their_part(architecture: Callable[[ArchSpec], Path]) -> None:
    spec = ArchSpec("gpt-oss", n_layer=2, n_expert=4, window=24)
    with kvg.Model(architecture(spec), device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        ctx.decode(batch_of(run_of(IDS)), observe=8)
        for index in range(2):
            assert 0.9 < ctx.attention(index).sum() < 1 - 1e-4


def test_when_there_is_nothing_to_tell(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as ctx:
        nothing = pytest.raises(kvg.InvalidArgumentError, match="observed no token's attention")
        with nothing:
            ctx.attention()
        for wrong in (3, -1, 2**70, 1.5):
            with pytest.raises(kvg.InvalidArgumentError, match="observe"):
                ctx.decode(batch_of(run_of(IDS[:2])), observe=wrong)  # type: ignore[arg-type]
        assert ctx.kv.n_used == 0
        ctx.decode(batch_of(run_of(IDS[:2])), observe=2)
        assert ctx.attention()[:2].sum() == pytest.approx(1)
        for ask in (ctx.attention, ctx.attention_of_heads):
            with pytest.raises(kvg.InvalidArgumentError, match="group"):
                ask(1)
        ctx.append(7)
        for ask in (ctx.attention, ctx.attention_of_heads):
            with pytest.raises(kvg.InvalidArgumentError, match="observed no token's attention"):
                ask()


def test_a_decode_that_fails_observes_nothing(small: kvg.Model) -> None:
    with open_context(small, **{**OPTIONS, "n_ubatch": 16}) as ctx:
        with fault("compute", 2), pytest.raises(kvg.DeviceError):
            ctx.decode(batch_of(run_of(IDS[:40])), observe=40)
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.attention()


def test_where_it_is_not_known(small: kvg.Model) -> None:
    with open_context(small, **{**OPTIONS, "flash_attn": "on", "type_k": "f16", "type_v": "f16"}) as ctx:
        with pytest.raises(kvg.UnsupportedError, match="where the CPU computes attention"):
            ctx.decode(batch_of(run_of(IDS[:2])), observe=1)
        assert ctx.kv.n_used == 0
        text = kvg.Sequence(ctx)
        text.set(IDS)
        with pytest.raises(kvg.UnsupportedError, match="where the CPU computes attention"):
            text.forget(10, "snapkv")
        assert ctx.kv.n_used == N

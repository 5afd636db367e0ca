"""Heads whose K and V differ in width: decode, shifts, copies, states.

libllama refuses llamas of this kind, so the judge is a naive llama in float64. It is itself held against ours
where libllama judges that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.engines import decode, open_context, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec
from support.naive_llama import naive_logits

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

ModelFile = Callable[[ModelSpec], Path]

WIDE_K = ModelSpec(n_head=4, n_head_kv=2, head_dim=96, value_dim=64)
WIDE_V = ModelSpec(n_head=4, n_head_kv=1, head_dim=32, value_dim=96)
ODD = ModelSpec(n_head=2, n_head_kv=2, head_dim=20, value_dim=12)
TWO_GROUPS = replace(WIDE_K, n_layer=3, n_head=4, kv_heads=(2, 4, 2))
N = 70
IDS = random_ids(N, N_VOCAB)
# how far rounding K and V may take logits
LIMITS = {"f32": 1e-9, "f16": 1e-5, "q8_0": 2e-3, "q4_0": 0.3}


@pytest.fixture(params=[WIDE_K, WIDE_V, ODD, TWO_GROUPS], ids=str)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    found: ModelSpec = request.param
    return found


@pytest.fixture
def model_path(model_file: ModelFile, spec: ModelSpec) -> Path:
    return model_file(spec)


def fitting(spec: ModelSpec, kv_type: str) -> str:
    if kv_type in ("q8_0", "q4_0") and (spec.k_dim % 32 or spec.v_dim % 32):
        pytest.skip("blocks of 32 don't fit these heads")
    return kv_type


def test_the_judge_itself(model_file: ModelFile) -> None:
    """It is right about a model that libllama runs, and on which libllama judges ours."""
    spec = replace(SMALL, seed=3)
    with (
        kvg.Model(model_file(spec), device=where.device) as model,
        open_context(model, type_k="f32", type_v="f32") as ctx,
    ):
        assert nmse(decode(ctx, run_of(IDS)), naive_logits(spec, IDS).astype(np.float32)) < where.rule(1e-9)


@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
@pytest.mark.parametrize("kv_type", list(LIMITS))
def test_logits(model_path: Path, spec: ModelSpec, kv_type: str, flash_attn: str) -> None:
    """A prompt, then single tokens. Quantized K and V are each mixed by a Hadamard matrix of their own."""
    with (
        kvg.Model(model_path, device=where.device) as model,
        open_context(model, type_k=fitting(spec, kv_type), type_v=kv_type, flash_attn=flash_attn) as ctx,
    ):
        layer = model.layers[0]
        assert (layer.head_dim_k, layer.head_dim_v) == (spec.k_dim, spec.v_dim)
        found = [decode(ctx, run_of(IDS[:60]))]
        found += [decode(ctx, run_of(IDS[i : i + 1], i)) for i in range(60, N)]
    assert nmse(np.concatenate(found), naive_logits(spec, IDS).astype(np.float32)) < where.rule(
        LIMITS[kv_type]
    )


@pytest.mark.parametrize("kv_type", list(LIMITS))
def test_edits_and_states(tmp_path: Path, model_path: Path, spec: ModelSpec, kv_type: str) -> None:
    """A text that was moved, copied, packed, saved and loaded goes on as if it hadn't been."""
    types = {"type_k": fitting(spec, kv_type), "type_v": kv_type, "n_ctx": 256, "n_seq_max": 3}
    expected = naive_logits(spec, IDS).astype(np.float32)[60:]
    with (
        kvg.Model(model_path, device=where.device) as model,
        open_context(model, **types) as ctx,
        open_context(model, **types) as other,
    ):
        decode(ctx, run_of(IDS[10:40], 0, (2,)))
        decode(ctx, run_of(IDS[:60], 300, (0,)))
        ctx.kv.seq_cp(0, 1, -1, -1)
        ctx.kv.seq_rm(2, -1, -1)
        ctx.kv.seq_rm(0, -1, -1)
        ctx.kv.seq_add(1, 0, -1, -173)
        ctx.kv.defrag()
        ctx.kv.update()
        ctx.kv.save_file(tmp_path / "state")
        other.kv.load_file(tmp_path / "state")
        for each in (ctx, other):
            assert nmse(decode(each, run_of(IDS[60:], 127 + 60, (1,))), expected) < where.rule(
                LIMITS[kv_type]
            )
        rows_k, rows_v = ctx.kv.read_k(0), ctx.kv.read_v(0)
        assert (rows_k.shape[-1], rows_v.shape[-1]) == (spec.k_dim, spec.v_dim)

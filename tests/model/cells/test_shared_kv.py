"""Layers that have no K and V of their own, and read those of an earlier layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import OurEngine, decode, open_context, prompt_then_singles, random_ids, run_of
from support.judge import judge, nmse
from support.models import N_VOCAB

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

Architecture = Callable[[ArchSpec], Path]

# of six layers, four read those of layers 0 (with a window) and 1
SPEC = ArchSpec("gemma4", n_layer=6, window=24, head_dim_window=64, n_shared=4, n_embd_layer=16)
IDS = random_ids(200, N_VOCAB)
F32 = {"type_k": "f32", "type_v": "f32"}


@pytest.fixture(scope="module")
def model(architecture: Architecture) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(SPEC), device=where.device) as opened:
        yield opened


def test_only_owners_have_cells(model: kvg.Model) -> None:
    assert [layer.group for layer in model.layers] == [1, 0, 1, 0, 1, 0]
    with open_context(model, n_ctx=100, **F32) as ctx:
        assert [(group.kind, group.layers) for group in ctx.kv.groups] == [
            ("full", (1,)),
            ("window", (0,)),
        ]
        assert ctx.kv.bytes == 256 * 2 * 2 * (32 + 64) * 4  # rows are padded to 256; K and V of two heads
        assert [part.n_cache for part in ctx.devices if part.n_cache] == [2]
        decode(ctx, run_of(IDS[:3]))
        assert ctx.kv.read_k(0).shape == (100, 2, 64)
        for layer, owner in ((2, 0), (3, 1), (4, 0), (5, 1)):
            for read in (ctx.kv.read_k, ctx.kv.read_v):
                with pytest.raises(
                    kvg.InvalidArgumentError, match=f"layer {layer} .* those of layer {owner}"
                ):
                    read(layer)


def test_a_prompt_without_outputs(model: kvg.Model) -> None:
    """Its graph ends with the last layer that has cells."""
    with open_context(model, n_ctx=128, **F32) as ctx, open_context(model, n_ctx=128, **F32) as other:
        decode(ctx, [token._replace(logits=False) for token in run_of(IDS[:30])])
        expected = decode(other, run_of(IDS[:31]))[-1:]
        assert nmse(decode(ctx, run_of(IDS[30:31], 30)), expected) <= where.rule(1e-6)
        for layer in (0, 1):
            assert nmse(ctx.kv.read_k(layer)[:31], other.kv.read_k(layer)[:31]) <= where.rule(1e-6)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_saved_cells_are_the_same(model: kvg.Model, kv_type: str) -> None:
    types = {"type_k": kv_type, "type_v": kv_type}
    with open_context(model, n_ctx=128, **types) as ctx, open_context(model, n_ctx=128, **types) as other:
        decode(ctx, run_of(IDS[:30]))
        other.kv.load(ctx.kv.save(0), 0)
        expected = prompt_then_singles(OurEngine(ctx), IDS[30:40], 1, pos0=30)
        assert np.array_equal(prompt_then_singles(OurEngine(other), IDS[30:40], 1, pos0=30), expected)


@pytest.mark.parametrize("policy", ["fill", "sort"])
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_copies_and_defrag_are_a_fresh_context(model: kvg.Model, kv_type: str, policy: str) -> None:
    types = {"type_k": kv_type, "type_v": kv_type}
    with open_context(model, n_ctx=128, n_seq_max=2, **types) as ctx:
        decode(ctx, run_of(IDS[:40]))
        ctx.kv.seq_cp(0, 1, 0, -1)
        ctx.kv.seq_rm(0, 5, 12)
        ctx.kv.seq_add(1, 20, -1, 7)
        ctx.kv.seq_rm(0, 30, -1)
        ctx.kv.defrag("sort" if policy == "sort" else "fill")
        assert ctx.kv.update().moved_cells > 0
        logits = decode(ctx, run_of(IDS[40:50], 47, (1,)))
    with open_context(model, n_ctx=128, **types) as fresh:
        decode(fresh, run_of(IDS[:40]))
        fresh.kv.seq_add(0, 20, -1, 7)
        assert nmse(logits, decode(fresh, run_of(IDS[40:50], 47))) <= where.rule(1e-6)


def test_queries_are_rotated_for_cells_that_wait(architecture: Architecture) -> None:
    """Those of the layers that share them, too: a shift costs no more than rounding K does."""
    path = architecture(replace(SPEC, window=256))

    def run(kv_type: str, delta: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        with open_context(model, n_ctx=256, type_k=kv_type, type_v="f32") as ctx:
            decode(ctx, run_of(IDS))
            ctx.kv.seq_rm(0, 8, 24)
            ctx.kv.seq_add(0, 24, -1, -delta)
            logits = prompt_then_singles(OurEngine(ctx), IDS[:20], 1, pos0=len(IDS) - delta)
            waiting.append(ctx.kv.update().waiting_cells)
            return logits

    waiting: list[int] = []
    with kvg.Model(path, device="cpu") as model:
        rounded = nmse(run("q8_0", 0), run("f32", 0))
        assert nmse(run("q8_0", 16), run("f32", 16)) <= 3 * rounded
    assert waiting[2] > 64 and waiting[3] == 0


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(SPEC, n_shared=3), "layer 3 reads K and V of layer 2, which has another window"),
        (replace(SPEC, n_shared=5), "shared_kv_layers"),
        (replace(SPEC, scaling="yarn"), "rope scaling 'yarn'"),
    ],
)
def test_files_that_are_refused(architecture: Architecture, spec: ArchSpec, reason: str) -> None:
    with pytest.raises((kvg.ModelLoadError, kvg.UnsupportedError), match=reason):
        kvg.Model(architecture(spec), device="cpu")


def test_logits_are_libllamas(architecture: Architecture) -> None:
    ids = IDS if where.is_cpu() else IDS[:60]
    judge(architecture(SPEC), lambda engine: prompt_then_singles(engine, ids, len(ids) - 20), n_ubatch=32)

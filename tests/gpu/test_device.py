"""A device with memory of its own, beside the CPU. What is right by itself is in ../model, with --device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engines import Logits, Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import contents
from support.kv_types import BLOCKS, EVEN_BLOCKS
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

ModelFile = Callable[[ModelSpec], Path]
SLACK = 10  # its kernels round more coarsely than the CPU's


@pytest.fixture(scope="module")
def model(device: str, model_file: ModelFile) -> Iterator[kvg.Model]:
    with kvg.Model(model_file(SMALL), device=device) as model:
        assert model.device == device
        yield model


def test_auto_takes_it(device: str, stories: Path) -> None:
    with kvg.Model(stories) as model:
        assert model.device == device


def endless(model: kvg.Model, ids: list[int]) -> Logits:
    """Tokens one by one through a cache of 48 cells: discard, shift, compact and decode by turns."""
    rows = []
    with open_context(model, n_ctx=48, type_k="f32", type_v="f32", flash_attn="off") as ctx:
        for token in ids:
            if ctx.kv.n_used == 48:
                kvg.ContextShift(n_keep=4).apply(ctx.kv)
            rows.append(decode(ctx, [Token(token, ctx.kv.seq_pos_max(0) + 1)]))
    return np.concatenate(rows)


def test_past_the_context_as_on_the_cpu(model: kvg.Model, small: kvg.Model) -> None:
    ids = random_ids(90, N_VOCAB)
    assert nmse(endless(model, ids), endless(small, ids)) <= SLACK * 1e-6


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("spec", [BLOCKS, EVEN_BLOCKS], ids=str)
@pytest.mark.parametrize("kv_type", ["bf16", "q8_0", "q5_1", "q4_0"])
def test_cache_types(
    device: str, model_file: ModelFile, kv_type: str, spec: ModelSpec, hadamard: bool
) -> None:
    """Refused when the context is made, or decoded, shifted and moved as on the CPU."""
    options = {"n_ctx": 300, "type_k": kv_type, "type_v": kv_type, "hadamard": hadamard}
    results = []
    for place in ("cpu", device):
        with kvg.Model(model_file(spec), device=place) as model:
            try:
                ctx = open_context(model, **options, defrag_threshold=-1)
            except kvg.UnsupportedError as refused:
                assert place == device, refused
                pytest.skip(str(refused))
            with ctx:
                rows = [decode(ctx, run_of(random_ids(60, N_VOCAB)))]
                before = ctx.kv.read_k(0)[:60]
                ctx.kv.seq_add(0, 0, -1, 100)
                ctx.kv.update()
                rows.append(decode(ctx, [Token(7, ctx.kv.seq_pos_max(0) + 1)]))
                for pos in range(0, 60, 2):
                    ctx.kv.seq_rm(0, pos + 100, pos + 101)
                held = contents(ctx.kv, 0)
                ctx.kv.defrag("fill")
                assert ctx.kv.update().moved_cells == 16
                assert contents(ctx.kv, 0) == held
                results.append((before, np.concatenate(rows)))
    (cpu_k, cpu_rows), (k, rows_there) = results
    assert nmse(k.reshape(60, -1), cpu_k.reshape(60, -1)) <= 1e-3
    assert nmse(rows_there, cpu_rows) <= 5e-2


@pytest.mark.parametrize(
    ("head_dim", "hadamard", "there"),
    [(64, True, True), (32, False, True), (32, True, False), (96, True, False)],
)
def test_small_rotations_are_left_to_the_cpu(
    device: str, model_file: ModelFile, head_dim: int, hadamard: bool, there: bool
) -> None:
    """GPUs multiply by matrices of less than 64 dimensions, some of them in less than F32."""
    path = model_file(ModelSpec(n_layer=1, n_head=4, n_head_kv=4, head_dim=head_dim, seed=8))
    with kvg.Model(path, device=device) as model:
        try:
            ctx = open_context(model, n_ctx=64, type_k="q8_0", hadamard=hadamard)
        except kvg.UnsupportedError as refused:
            pytest.skip(str(refused))
        with ctx:
            assert {part.device: part.shift_on_device for part in ctx.devices}[device] == there

"""A device with memory of its own: what the CPU forgives shows here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engines import (
    Engine,
    Logits,
    Token,
    decode,
    open_context,
    prompt_then_singles,
    random_ids,
    run_of,
)
from support.judge import judge, nmse
from support.kv_rows import allowed_drift, cells_at, contents, fresh_k
from support.kv_types import BLOCKS, EVEN_BLOCKS
from support.models import N_VOCAB, SMALL, ModelSpec, WeightType

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


def test_greedy_story_is_the_published_one(device: str, stories: Path, golden_story: str) -> None:
    with kvg.Model(stories, device=device) as model, kvg.Context(model, n_ctx=512) as ctx:
        pieces = list(kvg.generate(ctx, "", max_tokens=256))
    assert "".join(piece.text for piece in pieces).strip() == golden_story.strip()


@pytest.mark.parametrize(
    "spec",
    [SMALL, ModelSpec(n_layer=1, n_embd=256, n_head=4, n_head_kv=1, tied=True, weights=WeightType.Q8_0)],
    ids=str,
)
def test_logits(device: str, model_file: ModelFile, spec: ModelSpec) -> None:
    ids = random_ids(66, N_VOCAB)
    judge(
        model_file(spec),
        lambda engine: prompt_then_singles(engine, ids, 50),
        device=device,
        slack=SLACK,
        attentions=["off", "auto"],
    )


def shifted(engine: Engine) -> Logits:
    engine.decode(run_of(random_ids(50, N_VOCAB)))
    engine.seq_rm(0, 8, 24)
    engine.seq_add(0, 24, -1, -16)
    return prompt_then_singles(engine, random_ids(16, N_VOCAB, 1), 1, pos0=34)


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_logits_after_a_shift(device: str, model_file: ModelFile, kv_type: str) -> None:
    spec = ModelSpec(n_embd=64, n_head=2, n_head_kv=1, rope_factors=True)
    judge(model_file(spec), shifted, kv_type=kv_type, device=device, slack=SLACK, attentions=["auto"])


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_k_is_fresh_k_at_the_new_position(model: kvg.Model, kv_type: str) -> None:
    """Runs that begin anywhere, and the cells between them as they were."""
    tokens = run_of(random_ids(150, N_VOCAB))
    moved = [*range(33, 70), *range(101, 102), *range(120, 150)]
    with open_context(model, n_ctx=300, type_k=kv_type) as ctx:
        fresh = fresh_k(ctx, [tokens[pos]._replace(pos=pos + 200) for pos in moved])
        ctx.reset()
        decode(ctx, tokens)
        places = cells_at(ctx.kv, moved)
        still = np.setdiff1d(np.arange(150), places)
        before = ctx.kv.read_k(0)
        for p0, p1 in ((33, 70), (101, 102), (120, 150)):
            ctx.kv.seq_add(0, p0, p1, 200)
        assert sorted(ctx.kv.cells().pos[places]) == [pos + 200 for pos in moved]
        assert ctx.kv.update().shifted_cells == len(moved)
        k = ctx.kv.read_k(0)
    # SLACK for the angles: sines of other makers
    assert np.abs(k[places] - fresh).max() <= SLACK * allowed_drift(fresh, kv_type, 350)
    assert np.array_equal(k[still], before[still])


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("holes", [range(0, 200, 2), range(30, 130)], ids=["one by one", "one run"])
def test_defrag_moves_bytes(model: kvg.Model, holes: range, kv_type: str) -> None:
    with open_context(model, n_ctx=300, type_k=kv_type, type_v=kv_type, defrag_threshold=-1) as ctx:
        decode(ctx, run_of(random_ids(200, N_VOCAB)))
        for pos in holes:
            ctx.kv.seq_rm(0, pos, pos + 1)
        before = contents(ctx.kv, model.n_layer, 0)
        misplaced = int((ctx.kv.cells().pos[ctx.kv.n_used :] >= 0).sum())
        ctx.kv.defrag("fill")
        assert ctx.kv.update().moved_cells == misplaced > 0
        assert ctx.kv.n_kv == ctx.kv.n_used == 100
        assert contents(ctx.kv, model.n_layer, 0) == before
        assert np.isfinite(decode(ctx, [Token(5, 200)])).all()


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
                held = contents(ctx.kv, model.n_layer, 0)
                ctx.kv.defrag("fill")
                assert ctx.kv.update().moved_cells == 16
                assert contents(ctx.kv, model.n_layer, 0) == held
                results.append((before, np.concatenate(rows)))
    (cpu_k, cpu_rows), (k, rows_there) = results
    assert nmse(k.reshape(60, -1), cpu_k.reshape(60, -1)) <= 1e-3
    assert nmse(rows_there, cpu_rows) <= 5e-2

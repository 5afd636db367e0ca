"""Draft heads of the model's own (MTP): their logits against libllama's own graph of the same file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.draft_referee import draft_referee
from support.drafting import check_between_holes, decode, drafted_logits
from support.engines import open_context, random_ids
from support.faults import fault
from support.judge import FLOOR, nmse
from support.kept_graphs import grow_graphs
from support.models import N_VOCAB, WeightType
from support.planned import beside, decode_apart
from support.streams import connect, travel

import pykvgraph as kvg
from pykvgraph.context.draft_tokens import DraftedText

Architecture = Callable[[ArchSpec], Path]

SPECS = [
    ArchSpec("qwen35", 4, period=4, state_heads=4, n_rot=8, n_head=8, draft_head=True),
    ArchSpec("qwen35", 4, period=2, state_heads=4, fused=True, draft_head=True, draft_output=True),
    ArchSpec("qwen35moe", 4, period=4, state_heads=4, n_expert=8, n_ff_shared=48, draft_head=True),
    ArchSpec("qwen3next", 4, period=4, state_heads=4, n_expert=8, n_ff_shared=48, draft_head=True),
    ArchSpec("glm4moe", n_rot=16, n_expert=8, n_ff_shared=96, biases=True, draft_head=True),
    ArchSpec("glm4moe", n_rot=16, n_expert=8, n_ff_shared=96, draft_head=True, draft_output=True),
    ArchSpec("deepseek2", n_head_kv=1, rank=32, q_rank=48, n_expert=8, n_ff_shared=96, draft_head=True),
    ArchSpec("nemotron_h_moe", 6, state_heads=4, n_expert=8, n_ff_shared=48, draft_head=True),
    ArchSpec("nemotron_h_moe", 6, state_heads=8, n_expert=8, n_ff_shared=48, n_latent=32, draft_head=True),
]
N_DRAFTED = 4


@pytest.fixture(params=SPECS, ids=str)
def path(request: pytest.FixtureRequest, architecture: Architecture) -> Path:
    return architecture(request.param)


@pytest.fixture(params=SPECS[:1] + SPECS[4:5], ids=str)
def any_path(request: pytest.FixtureRequest, architecture: Architecture) -> Path:
    """With a state in some layers, and without."""
    return architecture(request.param)


def load(path: Path) -> kvg.Model:
    return kvg.Model(path, device=where.device, draft_heads=True)


@pytest.mark.any_device
def test_logits_are_libllamas(path: Path) -> None:
    compare(path, random_ids(100, N_VOCAB))


def test_logits_of_a_trained_head_are_libllamas() -> None:
    path = Path(__file__).parents[2] / "data" / "stories260K-mtp.gguf"
    with kvg.Model(path, device=where.device) as model:
        text = model.tokenizer.encode(path.with_name("stories260K.golden.txt").read_text()[:400])
    compare(path, text)


def compare(path: Path, text: Sequence[int]) -> None:
    with load(path) as model, open_context(model, n_ctx=256, n_batch=64, n_ubatch=16) as ctx:
        assert model.n_draft_heads == 1
        decode(ctx, text[:60], 0, chunk=40)  # over micro-batches and batches
        decode(ctx, text[60:-1], 60, chunk=1)
        drafts, ours = drafted_logits(ctx, [DraftedText(0, text[-1], N_DRAFTED)])
        assert ctx.kv.seq_pos_max(0) == len(text) - 2
        assert ctx.kv.n_free == 256 - len(text) + 1
        again, same = drafted_logits(ctx, [DraftedText(0, text[-1], N_DRAFTED)])
    assert drafts == again and np.array_equal(ours, same)
    assert drafts == [ours.argmax(axis=1).tolist()]
    theirs = {}
    for flash in (False, True):
        with draft_referee(path, flash=flash) as libllama:
            theirs[flash] = libllama.draft_logits(text, drafts[0])
    allowed = max(FLOOR, 2 * nmse(theirs[True], theirs[False]))
    assert nmse(ours, theirs[False]) <= where.rule(allowed)


def test_edits_forks_and_defrag_carry_the_heads_cells_over(any_path: Path) -> None:
    options: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "n_ctx": 256, "n_batch": 128}
    with load(any_path) as model:
        with open_context(model, **options) as ctx:
            goes_back = all(group.kind == "full" for group in ctx.kv.groups)
        check_between_holes(model, goes_back=goes_back, **options)


def test_positions_that_move_turn_the_heads_k(any_path: Path) -> None:
    """Decoded 9 positions further on, and moved back: as K that was decoded there."""
    text = random_ids(40, N_VOCAB, 4)
    options: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "n_ctx": 64}
    with load(any_path) as model:
        layer, found = model.n_layer - 1, []
        assert layer in kvg.Context(model, **options).kv.groups[0].layers
        for begin in (0, 9):
            with open_context(model, **options) as ctx:
                decode(ctx, text, begin)
                if begin:
                    ctx.kv.seq_add(0, 0, -1, -begin)
                    ctx.kv.update()
                found.append(ctx.kv.read_k(layer)[: len(text)])
    assert nmse(found[1], found[0]) < where.rule(FLOOR)


def test_a_saved_state_has_the_heads_cells(any_path: Path) -> None:
    text = random_ids(40, N_VOCAB, 5)
    with load(any_path) as model, open_context(model, n_ctx=64, n_seq_max=2) as ctx:
        decode(ctx, text, 0)
        saved, layer = ctx.kv.save(0), model.n_layer - 1
        rows = [ctx.kv.read_k(layer)[: len(text)], ctx.kv.read_v(layer)[: len(text)]]
        with open_context(model, n_ctx=64) as other:
            other.kv.load(saved, 0)
            for ours, theirs in zip(rows, (other.kv.read_k(layer), other.kv.read_v(layer)), strict=True):
                assert np.abs(ours).max() > 0
                assert np.array_equal(ours, theirs[: len(text)])
            assert other.draft([(0, 5, 4)]) == [[]]  # the state behind the text is no part of it
            decode(other, [5], len(text))
            assert len(other.draft([(0, 6, 4)])[0]) == 4
        ctx.kv.seq_rm(0, -1, -1)
        ctx.kv.load(saved, 1)
        assert ctx.draft([(1, 5, 4)]) == [[]]  # the same cells, and what was known of them is of no use
        with (
            kvg.Model(any_path, device=where.device) as plain,
            open_context(plain, n_ctx=64) as without,
            pytest.raises(kvg.StateError, match="n_layer = "),
        ):
            without.kv.load(saved, 0)


def test_without_the_head_nothing_is_spent_on_it(any_path: Path) -> None:
    with (
        kvg.Model(any_path, device=where.device) as plain,
        load(any_path) as model,
        open_context(plain, n_ctx=256) as without,
        open_context(model, n_ctx=256) as ctx,
    ):
        assert plain.has_draft_head and plain.n_draft_heads == 0
        assert plain.n_layer == model.n_layer - 1
        assert without.kv.groups[0].layers == ctx.kv.groups[0].layers[:-1]
        with pytest.raises(kvg.UnsupportedError, match="without a draft head"):
            without.draft([(0, 5, 4)])


@pytest.mark.parametrize("spec", [*SPECS[:1], *SPECS[5:]], ids=str)
def test_a_plan_counts_the_head(architecture: Architecture, spec: ArchSpec) -> None:
    path = architecture(replace(spec, weights=WeightType.F16))
    options: dict[str, Any] = {"n_ctx": 400, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 3, "n_threads": 1}
    options |= {"n_threads_batch": 1}
    plan = kvg.plan_memory(path, where.device, draft_heads=True, **options)
    plain = kvg.plan_memory(path, where.device, **options)
    with load(path) as model, kvg.Context(model, **options) as ctx:
        grow_graphs(ctx)
        decode_apart(ctx)
        for n in range(1, 4):
            ctx.draft([(seq, 5, 2) for seq in range(n)])
        for found in beside(plan, ctx.devices):
            assert found.error <= 0.02, found
    for kind in ("weight_bytes", "cache_bytes"):
        assert sum(getattr(part, kind) for part in plan) > sum(getattr(part, kind) for part in plain)


def test_what_has_no_head_is_refused(architecture: Architecture) -> None:
    plain = architecture(replace(SPECS[4], draft_head=False))
    with pytest.raises(kvg.UnsupportedError, match="no draft head"):
        kvg.Model(plain, device=where.device, draft_heads=True)
    with pytest.raises(kvg.UnsupportedError, match="stages have no draft heads"):
        kvg.Model(architecture(SPECS[4]), device=where.device, draft_heads=True, layers=range(1))
    with kvg.Model(plain, device=where.device) as model:
        assert not model.has_draft_head


def test_bad_requests_change_nothing(any_path: Path) -> None:
    with load(any_path) as model, open_context(model, n_ctx=32, n_seq_max=2, n_batch=16) as ctx:
        assert ctx.draft([]) == []
        decode(ctx, [5, 6, 7], 0)
        wrong: list[tuple[Any, str]] = [
            ([(2, 5, 1)], "seq is 2"),
            ([(0, N_VOCAB, 1)], "token is"),
            ([(0, 5, 1), (0, 5, 1)], "two drafts"),
            ([(0, 5, 17)], "17"),
            ([(2**31, 5, 1)], "seq must be"),
            ([(0, 5, 2**31)], "n must be"),
            (None, "texts"),
            ([0, 5, 1], "texts"),
            ([(0, 5)], "texts"),
        ]
        for bad, why in wrong:
            with pytest.raises(kvg.InvalidArgumentError, match=why):
                ctx.draft(bad)
        decode(ctx, random_ids(16, N_VOCAB), 3)
        decode(ctx, random_ids(12, N_VOCAB), 19)
        with pytest.raises(kvg.CacheFullError):
            ctx.draft([(0, 5, 2)])
        assert len(ctx.draft([(0, 5, 1)])[0]) == 1
        assert ctx.kv.seq_pos_max(0) == 30


def test_another_process_gets_the_heads_cells(any_path: Path) -> None:
    text = random_ids(40, N_VOCAB, 6)
    with (
        load(any_path) as model,
        open_context(model, n_ctx=64, n_seq_max=2) as source,
        open_context(model, n_ctx=64, n_seq_max=2) as target,
    ):
        decode(source, text, 0)
        decode(target, text[:9], 0)
        travel(source, 0, target, 1, connect(model.n_layer, 1, 2))
        layer = model.n_layer - 1
        cells = np.flatnonzero(target.kv.cells(0).seq[:, 1])
        assert len(cells) == len(text)
        for read in (kvg.KVCache.read_k, kvg.KVCache.read_v):
            theirs, ours = read(target.kv, layer)[cells], read(source.kv, layer)[: len(text)]
            assert sorted(map(bytes, theirs)) == sorted(map(bytes, ours))


@pytest.mark.parametrize("site", ["build", "alloc", "compute"])
def test_a_draft_that_fails_changes_nothing(architecture: Architecture, site: str) -> None:
    text = random_ids(20, N_VOCAB, 7)
    with load(architecture(SPECS[4])) as model, open_context(model, n_ctx=64) as ctx:
        decode(ctx, text, 0)
        with fault(site, 1), pytest.raises(kvg.DeviceError):
            ctx.draft([(0, 5, 3)])
        assert ctx.kv.n_free == 64 - len(text)
        assert ctx.kv.seq_pos_max(0) == len(text) - 1
        assert len(ctx.draft([(0, 5, 3)])[0]) == 3

"""Assistants, which draft for a model by its cells: their logits against libllama's on the same two files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.assistants import assistant_spec, assistant_tensors, write_assistant
from support.draft_referee import draft_referee
from support.drafting import check_between_holes, decode, drafted_logits
from support.engines import open_context, random_ids
from support.faults import fault
from support.judge import FLOOR, nmse
from support.kept_graphs import grow_graphs
from support.models import N_VOCAB, WeightType
from support.planned import beside, decode_apart

import pykvgraph as kvg
from pykvgraph.context.draft_tokens import DraftedText

Architecture = Callable[[ArchSpec], Path]

# the layers that an assistant reads have K and V of their own, or another layer's; windows have other heads
SPECS = [
    ArchSpec("gemma4", n_layer=6, window=24, head_dim_window=64, n_shared=2, n_embd_layer=32),
    ArchSpec("gemma4", n_layer=6, window=24, period=3, head_dim_window=16, n_head_kv_window=4),
    ArchSpec("gemma4", n_layer=4, window=24, v_of_k=True, n_expert=8),
]
N_DRAFTED = 4
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "n_ctx": 256, "n_batch": 128, "swa_full": True}


@pytest.fixture
def pair(architecture: Architecture, tmp_path: Path) -> tuple[Path, Path]:
    return architecture(SPECS[0]), write_assistant(SPECS[0], tmp_path / "assistant.gguf")


def load(pair: tuple[Path, Path]) -> kvg.Model:
    return kvg.Model(pair[0], device=where.device, assistant=pair[1])


@pytest.mark.any_device
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_logits_are_libllamas(architecture: Architecture, tmp_path: Path, spec: ArchSpec) -> None:
    text = random_ids(100, N_VOCAB)
    pair = architecture(spec), write_assistant(spec, tmp_path / "assistant.gguf")
    with load(pair) as model, open_context(model, n_ctx=256, n_batch=64, n_ubatch=16) as ctx:
        assert model.drafts and model.n_draft_heads == 0
        decode(ctx, text[:60], 0, chunk=40)  # over micro-batches and batches
        decode(ctx, text[60:-1], 60, chunk=1)
        drafts, ours = drafted_logits(ctx, [DraftedText(0, text[-1], N_DRAFTED)])
        again, same = drafted_logits(ctx, [DraftedText(0, text[-1], N_DRAFTED)])
    assert drafts == again and np.array_equal(ours, same)
    assert drafts == [ours.argmax(axis=1).tolist()]
    theirs = {}
    for flash in (False, True):
        with draft_referee(pair[0], flash=flash, assistant=pair[1], swa_full=flash) as libllama:
            theirs[flash] = libllama.draft_logits(text, drafts[0])
    allowed = max(FLOOR, 2 * nmse(theirs[True], theirs[False]))
    assert nmse(ours, theirs[False]) <= where.rule(allowed)
    assert nmse(ours[1:], ours[:-1]) > 0.1  # no two steps are alike


def test_quantized_weights(architecture: Architecture, tmp_path: Path) -> None:
    text = random_ids(40, N_VOCAB)
    path = write_assistant(SPECS[0], tmp_path / "assistant.gguf", weights=WeightType.Q8_0)
    with load((architecture(SPECS[0]), path)) as model, open_context(model, n_ctx=256) as ctx:
        decode(ctx, text[:-1], 0)
        drafts, ours = drafted_logits(ctx, [DraftedText(0, text[-1], N_DRAFTED)])
    with draft_referee(architecture(SPECS[0]), flash=False, assistant=path) as libllama:
        theirs = libllama.draft_logits(text, drafts[0])
    assert nmse(ours, theirs) < 1e-2  # each engine rounds products with such weights in its own way


def test_edits_forks_and_defrag_need_nothing(pair: tuple[Path, Path]) -> None:
    with load(pair) as model:
        check_between_holes(model, goes_back=True, **F32)


@pytest.mark.parametrize(("type_k", "allowed"), [("f32", 0.0), ("q8_0", 5e-3)])
def test_k_shifts_reach_the_assistant(pair: tuple[Path, Path], type_k: str, allowed: float) -> None:
    """Decoded 9 positions further on and moved back: as a text that was decoded there.

    With quantized K on the CPU its cells wait, and queries are rotated.
    """
    text = random_ids(150, N_VOCAB, 4)  # fewer cells than 64 wait for nothing
    found = []
    with load(pair) as model:
        for begin in (0, 9):
            with open_context(model, **{**F32, "type_k": type_k}) as ctx:
                decode(ctx, text[:-1], begin, chunk=100)
                if begin:
                    ctx.kv.seq_add(0, 0, -1, -begin)
                found.append(drafted_logits(ctx, [DraftedText(0, text[-1], 3)])[1])
    assert nmse(found[1], found[0]) <= max(where.rule(FLOOR), allowed)


def test_a_draft_takes_no_cells(pair: tuple[Path, Path]) -> None:
    text = random_ids(64, N_VOCAB, 5)
    with load(pair) as model, open_context(model, n_ctx=64, n_batch=64) as ctx:
        decode(ctx, text, 0)
        assert ctx.kv.n_free == 0
        before = ctx.kv.cells(0).pos.tolist()
        assert len(ctx.draft([(0, 5, 8)])[0]) == 8
        assert ctx.kv.cells(0).pos.tolist() == before and ctx.kv.seq_pos_max(0) == 63


def test_rows_may_age(pair: tuple[Path, Path]) -> None:
    text, found = random_ids(300, N_VOCAB, 6), []
    with load(pair) as model:
        for type_k in ("f16", "f16:q8_0@128"):
            with open_context(model, n_ctx=512, n_batch=64, type_k=type_k, type_v=type_k) as ctx:
                decode(ctx, text[:-1], 0, chunk=64)
                found.append(drafted_logits(ctx, [DraftedText(0, text[-1], 3)])[1])
    assert 0 < nmse(found[1], found[0]) < 1e-2


def test_a_loaded_text_has_drafts_behind_its_next_token(pair: tuple[Path, Path]) -> None:
    text = random_ids(40, N_VOCAB, 7)
    with load(pair) as model, kvg.Model(pair[0], device=where.device) as plain:
        with open_context(plain, n_ctx=64) as ctx:
            decode(ctx, text, 0)
            saved = ctx.kv.save(0)
        with open_context(model, n_ctx=64) as ctx:
            ctx.kv.load(saved, 0)  # a model with an assistant has the same cells
            assert ctx.draft([(0, 5, 4)]) == [[]]  # the state behind the text is no part of it
            decode(ctx, [5], len(text))
            assert len(ctx.draft([(0, 6, 4)])[0]) == 4


def test_a_plan_counts_the_assistant(architecture: Architecture, tmp_path: Path) -> None:
    path = architecture(SPECS[0])
    spec = assistant_spec(SPECS[0], n_embd=512)  # so that it is seen beside graphs
    assistant = write_assistant(SPECS[0], tmp_path / "assistant.gguf", spec=spec)
    options: dict[str, Any] = {"n_ctx": 400, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 3, "n_threads": 1}
    options |= {"n_threads_batch": 1}
    plan = kvg.plan_memory(path, where.device, assistant=assistant, **options)
    plain = kvg.plan_memory(path, where.device, **options)
    with load((path, assistant)) as model, kvg.Context(model, **options) as ctx:
        grow_graphs(ctx)
        decode_apart(ctx)
        for n in range(1, 4):
            ctx.draft([(seq, 5, 2) for seq in range(n)])
        for found in beside(plan, ctx.devices):
            assert found.error <= 0.02, found
    more = sum(part.weight_bytes for part in plan) - sum(part.weight_bytes for part in plain)
    assert 0.9 < more / assistant.stat().st_size < 1.1
    assert [part.cache_bytes for part in plan] == [part.cache_bytes for part in plain]


@pytest.mark.parametrize("site", ["build", "alloc", "compute"])
def test_a_draft_that_fails_changes_nothing(pair: tuple[Path, Path], site: str) -> None:
    text = random_ids(20, N_VOCAB, 8)
    with load(pair) as model, open_context(model, n_ctx=64) as ctx:
        decode(ctx, text, 0)
        with fault(site, 1), pytest.raises(kvg.DeviceError):
            ctx.draft([(0, 5, 3)])
        assert ctx.kv.n_free == 64 - len(text)
        assert len(ctx.draft([(0, 5, 3)])[0]) == 3


def refused(model: Path, assistant: Path, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        kvg.Model(model, device=where.device, assistant=assistant)


def test_what_is_no_assistant_of_the_model_is_refused(
    architecture: Architecture, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    model, assistant = pair
    with pytest.raises(kvg.UnsupportedError, match=r"drafts for another model.*assistant="):
        kvg.Model(assistant, device=where.device)
    refused(model, model, kvg.UnsupportedError, "no assistant: it drafts with cells of its own")
    refused(architecture(ArchSpec("gemma3", window=24)), assistant, kvg.UnsupportedError, "another one")
    refused(model, tmp_path / "missing.gguf", FileNotFoundError, "missing")
    with pytest.raises(kvg.InvalidArgumentError, match="path"):
        kvg.Model(model, device=where.device, assistant=5)  # type: ignore[arg-type]
    refused(architecture(SPECS[1]), assistant, kvg.UnsupportedError, "no layer of the model")
    bad = tmp_path / "bad.gguf"
    write_assistant(SPECS[0], bad, n_embd_target=96)
    refused(model, bad, kvg.UnsupportedError, "states of 96")
    write_assistant(SPECS[0], bad, n_drafting=1)
    refused(model, bad, kvg.UnsupportedError, "all of its 3 layers draft")
    tensors = assistant_tensors(assistant_spec(SPECS[0]), 64)
    for name in ("nextn.pre_projection.weight", "rope_freqs.weight", "blk.1.layer_output_scale.weight"):
        write_assistant(SPECS[0], bad, tensors={key: tensors[key] for key in tensors if key != name})
        refused(model, bad, kvg.ModelLoadError, f"'{name}' is missing")
    write_assistant(SPECS[0], bad, tensors=tensors | {"blk.0.attn_k.weight": tensors["blk.0.attn_q.weight"]})
    refused(model, bad, kvg.UnsupportedError, "attn_k.weight")


def test_a_file_says_what_it_is(pair: tuple[Path, Path]) -> None:
    with kvg.GgufFile(pair[1]) as file:
        info = file.model_info()
    assert (info.arch, info.n_layer, info.n_embd, info.n_embd_target) == ("gemma4-assistant", 3, 32, 64)
    with kvg.GgufFile(pair[0]) as file:
        assert file.model_info().n_embd_target == 0

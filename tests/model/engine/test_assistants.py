"""Drafts by an assistant: what is said stays the same, in fewer steps where they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.assistants import crafted_pair, write_assistant
from support.drafting import always_pays, said
from support.engines import random_ids
from support.models import N_VOCAB
from support.soak import F32

import pykvgraph as kvg

SPEC = ArchSpec("gemma4", n_layer=6, window=24, head_dim_window=16, n_shared=2, n_embd_layer=32)
PLAIN = ArchSpec("gemma4", n_layer=4, window=24)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay always, up to four tokens."""
    always_pays(monkeypatch)


def test_tokens_are_those_without_drafts(
    architecture: Callable[[ArchSpec], Path], tmp_path: Path, eager: None
) -> None:
    path, assistant = architecture(SPEC), write_assistant(SPEC, tmp_path / "assistant.gguf")
    with kvg.Model(path, device=where.device) as plain:
        without, before = said(plain)
    assert before.drafts == 0
    with kvg.Model(path, device=where.device, assistant=assistant) as model:
        found, stats = said(model)  # by itself, as there is an assistant
        assert found == without and stats.drafted > 0
        found, stats = said(model, n_ctx=160, overcommit=True, draft="mtp")  # texts are preempted
        assert found == without and stats.drafted > 0


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 1.0, 1.0), (0.02, 0.3, 0.97)])
def test_an_assistant_that_knows_the_model_saves_steps(
    architecture: Callable[[ArchSpec], Path],
    tmp_path: Path,
    eager: None,
    noise: float,
    least: float,
    most: float,
) -> None:
    """Of drafts of four tokens a share holds; without noise all, and a step says five tokens."""
    path, assistant = crafted_pair(PLAIN, architecture(PLAIN), tmp_path, noise)
    greedy, found, stats = kvg.SamplingParams(max_tokens=61, temperature=0.0), {}, {}
    for by in (None, assistant):
        with (
            kvg.Model(path, device=where.device, assistant=by) as model,
            kvg.Engine(model, n_ctx=512, n_seq_max=1, background=False, **F32) as engine,
        ):
            prompts = [random_ids(5, N_VOCAB, seed) for seed in range(4)]
            found[by] = [engine.submit(prompt, greedy).result().tokens for prompt in prompts]
            stats[by] = engine.stats()
    assert found[assistant] == found[None]
    rate = stats[assistant].accepted / stats[assistant].drafted
    assert least <= rate <= most
    n_saved = stats[None].steps - stats[assistant].steps  # of 61 steps for a text
    assert n_saved == 4 * 48 if noise == 0.0 else n_saved > 0.2 * 4 * 61


@pytest.mark.parametrize("n_ctx", [256, 48])
def test_generate_takes_it(architecture: Callable[[ArchSpec], Path], tmp_path: Path, n_ctx: int) -> None:
    """Also where the context is full, and what is left of the text moves."""
    path, assistant = crafted_pair(PLAIN, architecture(PLAIN), tmp_path, 0.01)
    found = {}
    for by in (None, assistant):
        with (
            kvg.Model(path, device=where.device, assistant=by) as model,
            kvg.Context(model, n_ctx=n_ctx, n_batch=32, swa_full=True, **F32) as ctx,
        ):
            draft: Any = {"draft": "mtp"} if by else {}
            shift, prompt = kvg.ContextShift(n_keep=4), random_ids(5, N_VOCAB, 1)
            pieces = kvg.generate(ctx, prompt, on_full=shift, max_tokens=70, temperature=0.0, **draft)
            found[by] = [piece.token for piece in pieces]
            if not by:
                with pytest.raises(kvg.UnsupportedError, match="assistant="):
                    kvg.generate(ctx, prompt, draft="mtp")
    assert len(found[None]) == 70 and found[assistant] == found[None]

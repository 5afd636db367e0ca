"""Layers with windows: the second request that begins alike goes on at the end of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.kinds import SINKS
from support.soak import F32, are_likeliest

import pykvgraph as kvg

BLOCK = 32
SPECS = [
    ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8),
    ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=40),  # wider than a block
    SINKS,
]
TALK = kvg.SamplingParams(max_tokens=8)
READ = kvg.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module", params=SPECS, ids=lambda spec: f"{spec.arch}-{spec.window}")
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.mark.parametrize("n_shared", [32, 33, 63, 300])
@pytest.mark.parametrize("n_batch", [48, 512])
def test_the_second_request_hits(model: kvg.Model, n_shared: int, n_batch: int) -> None:
    """It decodes what is behind the last block's end; the third one decodes what is its own alone."""
    shared = ids_of(model, n_shared, 1)
    prompts = [shared + ids_of(model, 60, n) for n in (2, 3, 4)]
    with kvg.Engine(model, n_ctx=2048, n_seq_max=2, n_batch=n_batch, **F32) as engine:
        decoded, found = [], []
        for prompt in prompts:
            before = engine.stats().decoded_tokens
            found.append(engine.submit(prompt, TALK).result(60))
            decoded.append(engine.stats().decoded_tokens - before - 7)  # of its answer
    n_again = n_shared % BLOCK
    assert decoded == [n_shared + 60, n_again + 60, 60]
    assert [each.n_cached for each in found] == [0, n_shared - n_again, n_shared]
    assert [each.n_decoded_again for each in found] == [0, n_again, 0]
    assert all(are_likeliest(model, p, each.tokens) for p, each in zip(prompts, found, strict=True))


def test_they_take_no_cells_that_others_need(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows with few cells beside those of texts and a batch: hardly a decode lacks any, and then such
    points make way: nothing is decoded without its drafts, and nobody is preempted."""
    real, lacking = kvg.Context.decode_rows, []

    def noted(ctx: kvg.Context, batch: kvg.Batch, **options: Any) -> Any:
        try:
            return real(ctx, batch, **options)
        except kvg.CacheFullError as error:
            lacking.append(error)
            raise

    monkeypatch.setattr(kvg.Context, "decode_rows", noted)
    texts = [ids_of(model, 300, n) for n in range(12)]
    prompts = [text + text[:100] for text in texts]
    params = kvg.SamplingParams(max_tokens=48)
    with kvg.Engine(
        model, n_ctx=8192, n_seq_max=4, n_batch=64, draft="ngram", background=False, **F32
    ) as engine:
        groups = engine.context.kv.groups
        number = next(i for i, group in enumerate(groups) if group.kind == "window")
        n_needed = 4 * groups[number].window + 64
        assert n_needed < groups[number].n_cells < len(texts) * 300  # not all of it can be kept
        requests = [engine.submit(prompt, params) for prompt in prompts]
        most = 0
        while engine.step():
            most = max(most, int((engine.context.kv.cells(number).held > 0).sum()))
        found = [request.result(0) for request in requests]
        again = engine.submit(texts[-1][:200], READ)
        while engine.step():
            pass
        stats = engine.stats()
    assert most > (groups[number].n_cells - n_needed) // 2
    assert again.result(0).n_cached >= 192 - BLOCK
    assert len(lacking) < len(texts)  # of over a hundred decodes
    assert stats.n_preempted == 0
    assert stats.drafted > 0
    assert "cells" not in stats.drafts_refused or not stats.drafts_refused["cells"]
    assert all(are_likeliest(model, p, each.tokens) for p, each in zip(prompts, found, strict=True))


def test_a_decode_that_lacks_cells_takes_theirs(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make way before anything else does."""
    real, n_failures = kvg.Context.decode_rows, [3]

    def lacking(ctx: kvg.Context, batch: kvg.Batch, **options: Any) -> Any:
        if n_failures[0]:
            n_failures[0] -= 1
            raise kvg.CacheFullError("as many cells as the test wants are missing")
        return real(ctx, batch, **options)

    with kvg.Engine(model, n_ctx=8192, n_seq_max=2, n_batch=64, **F32) as engine:
        engine.submit(ids_of(model, 300, 5), READ).result(60)
        before = engine.stats().n_resume_points
        assert before >= 300 // BLOCK
        monkeypatch.setattr(kvg.Context, "decode_rows", lacking)
        prompt = ids_of(model, 5, 6)
        said = engine.submit(prompt, TALK).result(60)
        assert engine.stats().n_resume_points <= before - 3 + 2  # two of the prompt itself
        assert engine.stats().n_preempted == 0
    assert are_likeliest(model, prompt, said.tokens)

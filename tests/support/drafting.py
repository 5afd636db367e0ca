"""Drafts by a draft head or an assistant: what tests of both ask of a context and of an engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import pykvgraph as kvg
from pykvgraph._native.ffi import KvgOutput
from pykvgraph._native.library import sized
from pykvgraph.context.draft_tokens import DraftedText, draft_tokens
from pykvgraph.engine.speculation import gate
from support import where
from support.engines import open_context, random_ids
from support.judge import FLOOR, nmse
from support.models import N_VOCAB
from support.soak import F32

CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 6, "n": 2},
    {"temperature": 0.0, "repeat_penalty": 1.3},
]


def always_pays(monkeypatch: pytest.MonkeyPatch, most: int = 4) -> None:
    """From now on drafts pay always, up to so many tokens."""
    monkeypatch.setattr(
        gate.Gate, "lengths", lambda self, asked, each=0.0: [min(limit, most) for _, limit in asked]
    )


def drafted_logits(ctx: kvg.Context, texts: Sequence[DraftedText]) -> tuple[list[list[int]], Any]:
    """What is drafted, and the logits of it: those of all first tokens, then of the second ones."""
    n = sum(text.n for text in texts)
    rows = np.full((n, ctx.model.n_vocab), np.nan, np.float32)
    output = sized(KvgOutput, logits=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), n_rows=n)
    return ctx._handle.call(draft_tokens, list(texts), output), rows


def decode(ctx: kvg.Context, ids: Sequence[int], pos: int, seq: int = 0, *, chunk: int = 1000) -> None:
    for begin in range(0, len(ids), chunk):
        batch = kvg.Batch()
        batch.extend(ids[begin : begin + chunk], pos + begin, (seq,), "last")
        ctx.decode(batch)


def check_between_holes(model: kvg.Model, *, goes_back: bool, **options: Any) -> None:
    """A text between holes, forked and moved, beside the same text alone in a cache.

    goes_back: whether the cache can take back the last tokens. options: of Context.
    """
    text, other = random_ids(70, N_VOCAB, 1), random_ids(30, N_VOCAB, 2)
    with open_context(model, **options) as ctx:
        decode(ctx, text[:-1], 0)
        _, alone = drafted_logits(ctx, [DraftedText(0, text[-1], 3)])
    with open_context(model, n_seq_max=4, **options) as ctx:
        decode(ctx, other, 0, 1)
        decode(ctx, text[:40], 0, 0)
        decode(ctx, other, len(other), 1)
        decode(ctx, text[40:-1], 40, 0)
        ctx.kv.seq_cp(0, 2, -1, -1)
        ctx.kv.seq_rm(1, -1, -1)
        ctx.kv.defrag("sort")
        assert ctx.kv.update().moved_cells > 0
        drafts, found = drafted_logits(
            ctx, [DraftedText(0, text[-1], 3), DraftedText(1, 5, 3), DraftedText(2, text[-1], 2)]
        )
        assert [len(draft) for draft in drafts] == [3, 0, 2]  # nothing is known of an empty sequence
        for rows in (found[[0, 2, 4]], found[[1, 3]]):
            assert nmse(rows, alone[: len(rows)]) < where.rule(FLOOR)
        batch = kvg.Batch()  # a draft of which nothing holds
        batch.extend([text[-1], *random_ids(3, N_VOCAB, 3)], len(text) - 1, (2,), "all")
        ctx.decode(batch)
        if goes_back:
            ctx.kv.seq_rm(2, len(text), -1)
            after, _ = drafted_logits(ctx, [DraftedText(2, 7, 1)])
            assert len(after[0]) == 1  # the state behind the text's last token is known


def said(model: kvg.Model, **options: Any) -> tuple[list[tuple[int, ...]], kvg.EngineStats]:
    """Answers to prompts with a common beginning, more of them than run at a time. options: of Engine."""
    options = {"n_ctx": 512, "n_seq_max": 3, "n_batch": 32, "background": False, **F32, **options}
    with kvg.Engine(model, **options) as engine:
        shared, requests = random_ids(40, N_VOCAB, 1), []
        for i in range(6):
            prompt = [*shared[: 40 * (i % 2)], *random_ids(10 + 7 * i, N_VOCAB, i)]
            params = kvg.SamplingParams(max_tokens=24, **CHOICES[i % len(CHOICES)])
            requests.append(engine.submit(prompt, params))
        tokens = [each.tokens for request in requests for each in request.results()]
        assert engine.context.kv.n_free > 0
        return tokens, engine.stats()

"""Drafts by a second model: what is said stays the same, whatever it proposes and however it fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.drafting import always_pays
from support.models import SMALL, ModelSpec
from support.recurrent import DELTA_NET
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.engine.speculation.draft_model import ModelDrafter
from pykvgraph.engine.speculation.last_drafts import LastDrafts

CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "seed": 9, "n": 2},
    {"temperature": 0.0, "repeat_penalty": 1.3},
]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay always, up to four tokens."""
    always_pays(monkeypatch)


def said(model: kvg.Model, **options: Any) -> tuple[list[tuple[int, ...]], kvg.EngineStats]:
    options = {"n_ctx": 1024, "n_seq_max": 3, "n_batch": 32, "background": False, **F32, **options}
    with kvg.Engine(model, **options) as engine:
        rng = np.random.default_rng(7)
        requests = []
        for i in range(6):
            prompt = rng.integers(3, model.n_vocab, 10 + 25 * (i % 3)).tolist()
            requests.append(
                engine.submit(prompt, kvg.SamplingParams(max_tokens=30, **CHOICES[i % len(CHOICES)]))
            )
        tokens = [each.tokens for request in requests for each in request.results()]
        return tokens, engine.stats()


def test_tokens_are_those_without_drafts(small: kvg.Model, other: kvg.Model) -> None:
    """The model itself as its draft is right wherever the likeliest token is chosen."""
    plain, before = said(small)
    good, right = said(small, draft=small)
    bad, wrong = said(small, draft=other)
    assert plain == good == bad
    assert right.accepted > 0.3 * right.drafted > 0
    assert wrong.accepted < 0.1 * wrong.drafted
    assert right.steps < 0.8 * before.steps


def test_greedy_drafts_of_the_model_itself_hold(small: kvg.Model) -> None:
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, background=False, draft=small, **F32) as engine:
        found = engine.submit([5, 6, 7, 8], kvg.SamplingParams(max_tokens=41)).result()
    assert found.drafted == found.accepted == 32  # 1 by the prompt, then 8 steps of 1 + 4


def test_reading_prompts_is_not_what_a_draft_takes(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text has to pay that once; or drafts would seem slow after each prompt, and each pause."""
    keep, catch_up = LastDrafts.keep, ModelDrafter._catch_up
    made: list[float] = []

    def kept(self: LastDrafts, drafts: Any, begin: float) -> None:
        made.append(time.perf_counter() - begin)
        keep(self, drafts, begin)

    def slowly(self: ModelDrafter, sequence: Any) -> bool:
        time.sleep(0.2)
        return catch_up(self, sequence)

    monkeypatch.setattr(LastDrafts, "keep", kept)
    monkeypatch.setattr(ModelDrafter, "_catch_up", slowly)
    with kvg.Engine(small, n_ctx=256, n_seq_max=2, background=False, draft=small, **F32) as engine:
        engine.submit([5, 6, 7, 8], kvg.SamplingParams(max_tokens=11)).result()
    assert made and min(made) < 0.2


def test_a_draft_model_of_another_vocabulary_is_refused(
    small: kvg.Model, stories: Path, model_file: Callable[[ModelSpec], Path]
) -> None:
    with (
        kvg.Model(stories, device=where.device) as larger,
        pytest.raises(kvg.InvalidArgumentError, match=r"512 tokens, the model's \d+"),
    ):
        kvg.Engine(small, n_ctx=256, draft=larger)
    path = model_file(dataclasses.replace(SMALL, seed=3))
    data = path.read_bytes()
    tokens = small.metadata["tokenizer.ggml.tokens"]
    name = tokens[40].encode()
    changed = path.with_name("renamed.gguf")
    changed.write_bytes(data.replace(name, bytes([name[0] ^ 1]) + name[1:], 1))
    with (
        kvg.Model(changed, device=where.device) as renamed,
        pytest.raises(kvg.InvalidArgumentError, match="token 40 is"),
    ):
        kvg.Engine(small, n_ctx=256, draft=renamed)


def test_a_draft_model_with_states_is_refused(architecture: Callable[[ArchSpec], Path]) -> None:
    with (
        kvg.Model(architecture(DELTA_NET), device=where.device) as model,
        pytest.raises(kvg.UnsupportedError, match="recurrent layers"),
    ):
        kvg.Engine(model, n_ctx=256, draft=model)


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_a_draft_model_that_fails_costs_nobody_anything(
    small: kvg.Model, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Every so many decodes of it."""
    plain, _ = said(small)
    calls = 0

    def fails(drafter: ModelDrafter) -> None:
        decode = drafter._ctx.decode

        def now_and_then(batch: kvg.Batch, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % n == 0:
                raise kvg.DeviceError("broken")
            decode(batch, **options)

        drafter._ctx.decode = now_and_then  # type: ignore[method-assign]

    init = ModelDrafter.__init__

    def broken(self: ModelDrafter, ctx: kvg.Context) -> None:
        init(self, ctx)
        fails(self)

    monkeypatch.setattr(ModelDrafter, "__init__", broken)
    tokens, stats = said(small, draft=small)
    assert tokens == plain
    assert calls >= n
    assert (stats.drafted > 0) == (n > 2)


def test_a_draft_model_without_room_makes_no_drafts(small: kvg.Model) -> None:
    """The cache of the draft has no room for texts that share cells in the other one."""
    prompt = list(range(3, 183))
    params = kvg.SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=1)
    tokens = []
    for draft in (None, small):
        with kvg.Engine(
            small, n_ctx=320, n_seq_max=3, n_batch=64, background=False, draft=draft, **F32
        ) as engine:
            tokens.append([each.tokens for each in engine.submit(prompt, params).results()])
            later = engine.submit(prompt[:50], kvg.SamplingParams(max_tokens=12)).result()
            assert (later.drafted > 0) == (draft is not None)
    assert tokens[0] == tokens[1]

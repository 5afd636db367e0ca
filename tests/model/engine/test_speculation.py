"""Drafts change when tokens are said, and never which ones."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import where
from support.architectures import ArchSpec
from support.kinds import KINDS, SINKS
from support.recurrent import MAMBA2
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.engine import model_run, postprocess
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.scheduler import Chunk
from pykvgraph.engine.speculation import drafters, gate, speculation
from pykvgraph.engine.step_seconds import StepSeconds

SPECS = [*KINDS, SINKS, MAMBA2]


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay always: tiny models take their time for a token more."""
    monkeypatch.setattr(gate.Gate, "lengths", lambda self, asked, each=0.0: [most for _, most in asked])


def said(
    model: kvg.Model, prompts: list[list[int]], params: list[kvg.SamplingParams], **options: Any
) -> tuple[list[tuple[int, ...]], kvg.EngineStats]:
    """What the texts say, a few at a time."""
    options = {"n_ctx": 4096, "n_seq_max": 3, "background": False, **F32, **options}
    with kvg.Engine(model, **options) as engine:
        requests = [engine.submit(*each) for each in zip(prompts, params, strict=True)]
        tokens = [each.tokens for request in requests for each in request.results()]
        return tokens, engine.stats()


def texts(model: kvg.Model) -> tuple[list[list[int]], list[kvg.SamplingParams]]:
    """Prompts that repeat themselves; greedy, sampled, with penalties, and several samples."""
    rng = np.random.default_rng(3)
    prompts, params = [], []
    for i in range(6):
        run = rng.integers(3, model.n_vocab, 12 + i).tolist()
        prompts.append(run * 4)
        choice: dict[str, Any] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 5},
            {"temperature": 0.3, "top_k": 5, "seed": 6},
            {"temperature": 0.5, "repeat_penalty": 1.2, "seed": 7},
            {"temperature": 1.0, "mirostat": 2, "seed": 8},
            {"temperature": 0.2, "n": 2, "seed": 9},
        ][i]
        params.append(kvg.SamplingParams(max_tokens=60, **choice))
    return prompts, params


class HalfRight:
    """Proposes what will be said, with a wrong token now and then; asked again and again, any length."""

    def __init__(self, texts: list[list[int]], n_vocab: int) -> None:
        self.texts, self.n_vocab = texts, n_vocab
        self.rng = random.Random(4)

    def drafts(self, asked: Sequence[tuple[RequestSequence, int]], *_: Any) -> list[list[int]]:
        return [self.draft(sequence.ids.tolist(), most) for sequence, most in asked]

    def draft(self, ids: list[int], most: int) -> list[int]:
        text = next(each for each in self.texts if each[: len(ids)] == ids)
        draft = text[len(ids) :][: self.rng.randrange(most + 1)]
        if draft and self.rng.random() < 0.5:
            draft[self.rng.randrange(len(draft))] = self.rng.randrange(self.n_vocab)
        return draft

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_tokens_are_those_without_drafts(model: kvg.Model, eager: None) -> None:
    """Greedy and sampled: a token is always the text's own sample of its own row."""
    prompts, params = texts(model)
    plain, before = said(model, prompts, params)
    drafted, after = said(model, prompts, params, draft="ngram")
    assert drafted == plain
    assert before.drafted == before.accepted == 0
    assert after.drafted > 0


def test_drafts_that_hold_and_drafts_that_do_not(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = texts(model)
    plain, before = said(model, prompts, params)
    whole = [list(prompts[min(i, 5)]) + list(tokens) for i, tokens in enumerate(plain)]
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: HalfRight(whole, model.n_vocab))
    drafted, after = said(model, prompts, params, draft="ngram")
    assert drafted == plain
    assert after.steps < 0.6 * before.steps
    assert after.drafted > after.accepted > 0
    assert after.decoded_tokens == before.decoded_tokens + after.drafted - after.accepted


class Always:
    """Proposes the same tokens, whatever was said."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def drafts(self, asked: Sequence[tuple[RequestSequence, int]], *_: Any) -> list[list[int]]:
        return [self.tokens[:most] for _, most in asked]

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        pass

    def close(self) -> None:
        pass


def joint(model: kvg.Model, prompt: list[int], few: list[int], n: int) -> npt.NDArray[np.float64]:
    """The probability of each n tokens of `few` behind the prompt, from rows of a context of their own."""
    found = np.ones(len(few) ** n)
    with kvg.Context(model, n_ctx=512, **F32) as ctx:
        for i, text in enumerate(itertools.product(range(len(few)), repeat=n)):
            batch = kvg.Batch()
            batch.extend([*prompt, *(few[j] for j in text[:-1])], 0, logits="all")
            ctx.decode(batch)
            rows = ctx.logits()[-n:][:, few].astype(np.float64)
            ctx.kv.clear()
            odds = np.exp(rows - rows.max(axis=1, keepdims=True))
            found[i] = np.prod(odds[range(n), text] / odds.sum(axis=1))
    return found


@pytest.mark.slow
def test_the_distribution_is_the_models(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 draws: chi-squared of three tokens in a row, of four that may be said; the last two have drafts.

    Of 63 degrees of freedom it is above 117 in less than 1 of 10,000 tests.
    """
    few, prompt = [5, 17, 40, 99], [7, 8, 9, 10]
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Always(17, 5))
    bias = [(token, -math.inf if token not in few else 0.0) for token in range(small.n_vocab)]
    params = kvg.SamplingParams(max_tokens=3, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=bias)
    counts = np.zeros(64)
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 16, "background": False, "draft": "ngram", **F32}
    with kvg.Engine(small, **options) as engine:
        for seed in range(10_000 // 16):
            chosen = dataclasses.replace(params, n=16, seed=1000 * seed)
            for each in engine.submit(prompt, chosen).results():
                place = np.ravel_multi_index([few.index(token) for token in each.tokens], (4, 4, 4))
                counts[place] += 1
        assert 0 < engine.stats().accepted < engine.stats().drafted
    expected = joint(small, prompt, few, 3) * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 117


class Right(Always):
    """Proposes what will be said."""

    def drafts(self, asked: Sequence[tuple[RequestSequence, int]], *_: Any) -> list[list[int]]:
        return [self.tokens[sequence._n_said :][:most] for sequence, most in asked]


def test_a_window_is_full_where_it_was(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft ends where the text gives up tokens: what it says behind the shift is the same."""
    prompt = [5, 6, 7, 8, 9, 10] * 5
    params = kvg.SamplingParams(max_tokens=150)
    tokens: list[tuple[int, ...]] = []
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Right(*tokens[0]))
    for draft in (None, "ngram"):
        with kvg.Engine(small, n_ctx=256, n_seq_max=2, background=False, draft=draft, **F32) as engine:
            found = engine.submit(prompt, params, window=kvg.Window(45, 4, 11)).result()
            assert found.n_discarded > 100
            assert found.drafted == found.accepted
            assert (found.drafted > 100) == (draft is not None)
            tokens.append(found.tokens)
    assert tokens[0] == tokens[1]


def test_three_quarters_of_the_cells_are_for_drafts(
    small: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text at n tokens of 64 cells: 48 - n - 1 draft tokens pass, exactly, and none beyond."""
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Always(*range(20)))
    lengths: list[tuple[int, int]] = []
    add = speculation.Speculation.add

    def listen(self: Any, chunks: Any, *rooms: Any) -> Any:
        found = add(self, chunks, *rooms)
        lengths.append((chunks[0].sequence.n_decoded, len(found[0].draft)))
        return found

    monkeypatch.setattr(speculation.Speculation, "add", listen)
    with kvg.Engine(small, n_ctx=64, n_seq_max=1, background=False, draft="ngram", **F32) as engine:
        engine.submit([*range(3, 33)], kvg.SamplingParams(max_tokens=30)).result()
        refused = engine.stats().drafts_refused["cells"]
    decoding = [each for each in lengths if each[0] >= 30]
    assert decoding
    assert all(n == max(min(48 - at - 1, 16, 30 - (at - 29) - 1), 0) for at, n in decoding)
    assert refused == sum(n < min(16, 30 - (at - 29) - 1) for at, n in decoding)


def test_a_seventeenth_text_ends_drafts(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 6, 7] * 8
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Always(3, 4))
    for n, drafts in ((16, True), (17, False)):
        with kvg.Engine(small, n_ctx=4096, n_seq_max=17, background=False, draft="ngram", **F32) as engine:
            params = kvg.SamplingParams(max_tokens=6, n=n)
            completions = engine.submit(prompt, params).results()
            assert (sum(each.drafted for each in completions) > 0) == drafts
            assert (engine.stats().drafts_refused["busy"] > 0) != drafts


class Asks(Always):
    """Proposes as many as the gate allows."""

    def drafts(self, asked: Sequence[tuple[RequestSequence, int]], gate: Any, *_: Any) -> list[list[int]]:
        return [self.tokens[:n] for n in gate.lengths([(0.5, most) for _, most in asked])]


@pytest.mark.parametrize("pays", [True, False])
def test_steps_whose_drafts_are_too_slow_are_counted(
    small: kvg.Model, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """No draft holds: 19 steps say a token each, two of which are without, and the last needs no draft."""
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Asks(3, 4))
    monkeypatch.setattr(StepSeconds, "of", lambda self, n_rows: 1.0 if pays else float(n_rows))
    with kvg.Engine(small, n_ctx=512, n_seq_max=1, background=False, draft="ngram", **F32) as engine:
        engine.submit([5, 6, 7] * 4, kvg.SamplingParams(max_tokens=20, logit_bias={9: 1e6})).result()
        stats = engine.stats()
    assert (stats.drafted > 0) == pays
    assert stats.drafts_refused == {"busy": 0, "slow": 0 if pays else 16, "cells": 0}


def test_any_draft_max_has_room(small: kvg.Model) -> None:
    """No step has more tokens than a batch."""
    with kvg.Engine(small, n_ctx=64, draft="ngram", draft_max=10**9, background=False, **F32) as engine:
        assert len(engine.submit([5, 6, 7], kvg.SamplingParams(max_tokens=9)).result().tokens) == 9


def test_a_step_is_timed_without_making_drafts_and_without_saying(
    small: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate adds the seconds for making a draft itself, and what is said takes as long without drafts."""
    drafts, process, learn = Always.drafts, postprocess.Postprocess.process, StepSeconds.learn
    timed: list[float] = []

    def slowly(done: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(0.2)
            return done(*args)

        return run

    def learned(self: StepSeconds, n_rows: int, seconds: float, depth: int) -> None:
        timed.append(seconds)
        learn(self, n_rows, seconds, depth)

    monkeypatch.setattr(Always, "drafts", slowly(drafts))
    monkeypatch.setattr(postprocess.Postprocess, "process", slowly(process))
    monkeypatch.setattr(StepSeconds, "learn", learned)
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Always(3))
    with kvg.Engine(small, n_ctx=128, n_seq_max=1, background=False, draft="ngram", **F32) as engine:
        engine.submit([5, 6, 7], kvg.SamplingParams(max_tokens=5, logit_bias={9: 1e6})).result()
    assert timed
    assert min(timed) < 0.2


def test_drafts_make_way_for_what_others_hold(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 cells the engine has 24: a text with 7 of them has a draft of 16 tokens, one with 8 none."""
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Always(*[3] * 16))
    options: dict[str, Any] = {"draft": "ngram", "draft_share": 1.0, **F32}
    with kvg.Engine(small, n_ctx=64, n_seq_max=1, background=False, **options) as engine:
        first = engine.submit([*range(3, 43)], kvg.SamplingParams(max_tokens=2))
        engine.step()
        hold = engine.context.kv.hold(0, 0, 40)
        first.result()
        request = engine.submit([5], kvg.SamplingParams(max_tokens=60, logit_bias={9: 1e6}))
        engine.step()
        while engine.look().running[0].n_said < 12:
            engine.step()
        stats = engine.stats()
        request.cancel()
        hold.release()
    assert stats.drafted == 8 * 16
    assert stats.drafts_refused == {"busy": 0, "slow": 0, "cells": 4}


class First(Always):
    """Proposes something for the oldest text alone."""

    def drafts(self, asked: Sequence[tuple[RequestSequence, int]], *_: Any) -> list[list[int]]:
        return [self.tokens[:most] if sequence.order == 1 else [] for sequence, most in asked]


def test_texts_without_drafts_come_first(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has them together, in one call for all."""
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: First(3, 4))
    seen: set[tuple[bool, ...]] = set()
    run = model_run.ModelRun.run

    def listen(self: Any, chunks: list[Chunk]) -> Any:
        seen.add(tuple(chunk.is_single for chunk in chunks))
        return run(self, chunks)

    monkeypatch.setattr(model_run.ModelRun, "run", listen)
    with kvg.Engine(small, n_ctx=512, n_seq_max=3, background=False, draft="ngram", **F32) as engine:
        params = kvg.SamplingParams(max_tokens=10, logit_bias={9: 1e6})
        for request in [engine.submit([5, 6, token], params) for token in (7, 8, 9)]:
            request.result()
    assert (True, True, False) in seen
    assert all(singles == tuple(sorted(singles, reverse=True)) for singles in seen)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 1.0])
def test_drafts_end_at_their_share_of_the_cells(
    small: kvg.Model, eager: None, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """With the last one exactly so many are in use; behind it, the cells are why there is none."""
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Always(3, 4))
    options: dict[str, Any] = {"draft": "ngram", "draft_share": share, **F32}
    with kvg.Engine(small, n_ctx=512, n_seq_max=1, background=False, **options) as engine:
        decode, most = engine.context.decode_rows, 0

        def watched(batch: kvg.Batch, **options: Any) -> Any:
            nonlocal most
            if engine.stats().decoded_tokens and len(batch) > 1:
                most = max(most, engine.context.kv.n_used + len(batch))
            return decode(batch, **options)

        engine.context.decode_rows = watched  # type: ignore[method-assign]
        engine.submit([5, 6, 7] * 8, kvg.SamplingParams(max_tokens=480)).result()
        stats = engine.stats()
    assert most == share * 512 if share < 1 else most > 480
    assert (stats.drafted > 0) == (share > 0)
    assert (stats.drafts_refused["cells"] > 0) == (share < 1)
    assert stats.drafts_refused["busy"] == 0


def test_a_batch_that_fails_is_decoded_without_drafts(small: kvg.Model, eager: None) -> None:
    prompt = [5, 6, 7, 8] * 6
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, background=False, draft="ngram", **F32) as engine:
        decode = engine.context.decode_rows

        def fails(batch: kvg.Batch, **options: Any) -> Any:
            if len(batch) > 1 and engine.stats().decoded_tokens:
                raise kvg.DeviceError("broken")
            return decode(batch, **options)

        engine.context.decode_rows = fails  # type: ignore[method-assign]
        found = engine.submit(prompt, kvg.SamplingParams(max_tokens=12)).result()
        assert are_likeliest(small, prompt, found.tokens)
        assert found.drafted == found.accepted == 0


def test_a_draft_that_does_not_go_away_sets_its_text_aside(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text waits, is decoded again, and says what it would have said."""
    prompt = [5, 6, 7, 8] * 6
    monkeypatch.setattr(drafters, "NgramDrafter", lambda: Always(3, 4))
    n_left = 3

    def fails(self: kvg.KVCache, seq: int, p0: int, p1: int) -> None:
        nonlocal n_left
        if p0 > 0 and n_left:
            n_left -= 1
            raise kvg.DeviceError("broken")
        seq_rm(self, seq, p0, p1)

    seq_rm = kvg.KVCache.seq_rm
    monkeypatch.setattr(kvg.KVCache, "seq_rm", fails)
    with kvg.Engine(model, n_ctx=512, n_seq_max=2, background=False, draft="ngram", **F32) as engine:
        found = engine.submit(prompt, kvg.SamplingParams(max_tokens=20)).result()
        assert are_likeliest(model, prompt, found.tokens)
        assert engine.stats().n_preempted > 0 == n_left


def test_what_draft_may_be(small: kvg.Model) -> None:
    refused: list[dict[str, Any]] = [
        {"draft": "eagle"},
        {"draft": 1},
        {"draft": "ngram", "draft_max": 0},
        {"draft": "ngram", "draft_share": -0.01},
        {"draft": "ngram", "draft_share": 1.01},
    ]
    for options in refused:
        with pytest.raises(kvg.InvalidArgumentError, match="draft"):
            kvg.Engine(small, n_ctx=256, **options)

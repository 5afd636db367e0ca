"""Texts that forget in their windows: as one alone does, and without harm to whoever shares their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.naive_scores import keydiff, lowest
from support.shifted import follows_alone
from support.soak import F32, are_likeliest

import pykvgraph as kvg

LLAMA = ArchSpec("llama", 2, 32, 2, 1, 16, 32)
N_CTX = 120


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(LLAMA), device=where.device) as model:
        yield model


def least(policy: str, n_keep: int) -> Callable[[kvg.Context, int], int]:
    """Gives up half of the tokens that may be, by hand."""
    n_sinks = max(n_keep, 4)

    def give_up(ctx: kvg.Context, n: int) -> int:
        scores = keydiff(ctx) if policy == "keydiff" else list(range(n))
        gone = lowest(scores, -(-(n - n_sinks - 64) // 2), n_sinks)
        for p in reversed(gone):
            ctx.kv.seq_rm(0, p, p + 1)
            ctx.kv.seq_add(0, p + 1, -1, -1)
        return len(gone)

    return give_up


@pytest.mark.parametrize(("policy", "n_keep"), [("window", 0), ("keydiff", 0), ("keydiff", 20)])
def test_it_says_what_one_alone_says(model: kvg.Model, policy: str, n_keep: int) -> None:
    prompt = ids_of(model, 60, n_keep)
    window = kvg.Window(N_CTX, n_keep, forget=policy)
    with kvg.Engine(model, n_ctx=400, n_seq_max=3, **F32) as engine:
        others = [engine.submit(ids_of(model, 30, i), kvg.SamplingParams(max_tokens=100)) for i in range(2)]
        done = engine.submit(prompt, kvg.SamplingParams(max_tokens=120), window=window).result()
        assert follows_alone(model, prompt, list(done.tokens), N_CTX, least(policy, n_keep)) > 1
        assert 0 < 59 + len(done.tokens) - done.n_discarded < N_CTX
        for i, other in enumerate(others):
            assert are_likeliest(model, ids_of(model, 30, i), other.result().tokens)


@pytest.mark.parametrize("n_prompt", [N_CTX - 1, N_CTX, N_CTX + 1, 400])
@pytest.mark.parametrize("policy", ["window", "keydiff"])
def test_a_prompt_that_is_longer_than_the_window(model: kvg.Model, policy: str, n_prompt: int) -> None:
    """It is read in parts, whatever others do; a second time, too, when its beginning is in the cache."""
    prompt = ids_of(model, n_prompt, 5)
    window = kvg.Window(N_CTX, 10, forget=policy)
    params = kvg.SamplingParams(max_tokens=40)
    with kvg.Engine(model, n_ctx=400, n_seq_max=3, **F32) as engine:
        others = [engine.submit(ids_of(model, 30, i), kvg.SamplingParams(max_tokens=90)) for i in range(2)]
        for n_had in (0, 10):
            request = engine.submit(prompt, params, window=window)
            done = request.result()
            assert follows_alone(model, prompt, list(done.tokens), N_CTX, least(policy, 10)) >= 1
            assert done.n_prompt == n_prompt
            assert 0 < n_prompt - 1 + len(done.tokens) - done.n_discarded < N_CTX
            assert n_had <= done.n_cached < N_CTX
        for i, other in enumerate(others):
            assert are_likeliest(model, ids_of(model, 30, i), other.result().tokens)


def test_a_beginning_that_is_longer_than_the_window_is_there(model: kvg.Model) -> None:
    """Of what another text has left in the cache it takes as much as its window holds."""
    prompt = ids_of(model, 300, 6)
    with kvg.Engine(model, n_ctx=600, n_seq_max=2, **F32) as engine:
        engine.submit(prompt, kvg.SamplingParams(max_tokens=1)).result()
        window = kvg.Window(N_CTX, forget="keydiff")
        done = engine.submit(prompt, kvg.SamplingParams(max_tokens=30), window=window).result()
        assert done.n_cached == N_CTX - 1
        assert follows_alone(model, prompt, list(done.tokens), N_CTX, least("keydiff", 0)) > 1
        later = engine.submit([*prompt, 7], kvg.SamplingParams(max_tokens=5)).result()
        assert later.n_cached == 300
        assert are_likeliest(model, [*prompt, 7], later.tokens)


def test_progress_of_a_long_prompt(model: kvg.Model) -> None:
    """It is told in tokens of the prompt, whatever was given up of them."""
    prompt = ids_of(model, 400, 7)
    with kvg.Engine(model, n_ctx=200, n_seq_max=1, background=False, **F32) as engine:
        window = kvg.Window(N_CTX, forget="window")
        request = engine.submit(prompt, kvg.SamplingParams(max_tokens=2), window=window)
        request.result()
        told = [progress.n_decoded for progress in request._progress]
    assert told == sorted(told)
    assert told[-1] == 400


def test_who_shares_the_prompt_is_not_touched(model: kvg.Model) -> None:
    """Cells that the index of prefixes has, too, are forgotten by this text alone; and nobody gets its."""
    prompt = ids_of(model, 70, 1)
    with kvg.Engine(model, n_ctx=500, n_seq_max=3, **F32) as engine:
        window = kvg.Window(N_CTX, forget="keydiff")
        forgetful = engine.submit(prompt, kvg.SamplingParams(max_tokens=100), window=window)
        plain = engine.submit(prompt, kvg.SamplingParams(max_tokens=20))
        said = list(forgetful.result().tokens)
        assert follows_alone(model, prompt, said, N_CTX, least("keydiff", 0)) > 0
        assert are_likeliest(model, prompt, plain.result().tokens)
        later = engine.submit([*prompt, *said], kvg.SamplingParams(max_tokens=10)).result()
        assert 69 <= later.n_cached < N_CTX
        assert are_likeliest(model, [*prompt, *said], later.tokens)


def test_a_window_that_is_kept_whole(model: kvg.Model) -> None:
    """Where nothing may be forgotten, tokens are discarded as without a policy."""
    prompt = ids_of(model, 60, 3)
    with kvg.Engine(model, n_ctx=200, n_seq_max=1, **F32) as engine:
        params = kvg.SamplingParams(max_tokens=90)
        told = [
            engine.submit(prompt, params, window=kvg.Window(N_CTX, 1000, forget=policy)).result()
            for policy in (None, "keydiff")
        ]
    assert told[0].tokens == told[1].tokens
    assert told[0].n_discarded == told[1].n_discarded > 0


def test_where_every_layer_has_a_window(architecture: Callable[[ArchSpec], Path]) -> None:
    """No cell may be forgotten: tokens are discarded as without a policy."""
    spec = ArchSpec("gemma3", n_layer=2, window=24, period=4)
    params = kvg.SamplingParams(max_tokens=150)
    with (
        kvg.Model(architecture(spec), device=where.device) as windows,
        kvg.Engine(windows, n_ctx=200, n_seq_max=1, swa_full=True, **F32) as engine,
    ):
        told = [
            engine.submit(ids_of(windows, 60, 3), params, window=kvg.Window(N_CTX, forget=policy)).result()
            for policy in (None, "keydiff")
        ]
    assert told[0].tokens == told[1].tokens
    assert told[0].n_discarded == told[1].n_discarded > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((71, 0, 0, "window"), "n_ctx"),
        ((100, 0, 0, "lru"), "policy must be"),
        ((100, 0, 0, "snapkv"), "once more"),
    ],
)
def test_what_is_no_window(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=said):
        kvg.Window(*arguments)

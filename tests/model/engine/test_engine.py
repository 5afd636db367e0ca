"""Requests together say what each says alone; what they share is decoded once, on every kind of model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import sanitizer, where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.kinds import KINDS
from support.recurrent import MAMBA2
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.engine.token_budget import TokenBudget

DENSE, WINDOWED, _ = KINDS
SPECS = [*KINDS, MAMBA2]
TALK = kvg.SamplingParams(max_tokens=12)
READ = kvg.SamplingParams(max_tokens=1)
counts_only = pytest.mark.skipif(sanitizer.ADDRESS, reason="long prompts, as short ones before")


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.fixture(scope="module")
def dense(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(DENSE), device=where.device) as model:
        yield model


@pytest.mark.parametrize("at_once", [True, False])
def test_together_they_say_what_each_says_alone(model: kvg.Model, at_once: bool) -> None:
    shared = ids_of(model, 90, 1)
    prompts = [shared + ids_of(model, n, n) for n in (40, 3, 70, 1)]
    prompts += [shared[:50] + ids_of(model, 30, 9), prompts[0], shared]
    with kvg.Engine(model, n_ctx=2048, n_seq_max=4, n_batch=48, **F32) as engine:
        if at_once:
            found = [request.result(60) for request in [engine.submit(p, TALK) for p in prompts]]
        else:
            found = [engine.submit(p, TALK).result(60) for p in prompts]
        assert engine.stats().prefix_hit_tokens == sum(each.n_cached for each in found) > 200
    assert all(are_likeliest(model, p, each.tokens) for p, each in zip(prompts, found, strict=True))
    assert {len(each.tokens) for each in found} == {12}
    assert {each.finish_reason for each in found} == {"length"}


@pytest.mark.slow
@counts_only
def test_a_branch_is_taken_from_where_two_texts_were_seen_to_part(model: kvg.Model) -> None:
    """6,476 shared tokens as in SGLang #22935: 0.92 of them are not decoded again for the second request,
    and 0.99 for those after it."""
    shared = ids_of(model, 6476, 2)
    with kvg.Engine(model, n_ctx=16384, n_seq_max=2) as engine:
        found = [engine.submit(shared + ids_of(model, n, n), READ).result(60) for n in (41, 40, 376, 1296)]
    hits = [each.n_cached / 6476 for each in found]
    assert hits[0] == 0
    assert hits[1] >= 0.92
    assert min(hits[2:]) >= 0.99


@pytest.mark.slow
@counts_only
@pytest.mark.parametrize("at_once", [True, False])
def test_a_prefix_is_decoded_once_for_24_requests(model: kvg.Model, at_once: bool) -> None:
    """1,500 shared and 700 own tokens as in vLLM #45238; 18,300 tokens would do."""
    shared = ids_of(model, 1500, 3)
    prompts = [shared + ids_of(model, 700, n) for n in range(24)]
    with kvg.Engine(model, n_ctx=32768, n_seq_max=8) as engine:
        requests = []
        for prompt in prompts:
            requests.append(engine.submit(prompt, READ))
            if not at_once:
                requests[-1].result(60)
        for request in requests:
            request.result(60)
        assert 18_290 <= engine.stats().decoded_tokens <= 20_500


def test_short_prefixes_hit_too(model: kvg.Model) -> None:
    """480 shared and 60 own tokens as in vLLM #40696; 1,200 tokens would do. On a CPU a prompt has a spare
    resume point every 64 tokens; on a device the second one decodes the shared tokens again."""
    shared = ids_of(model, 480, 4)
    with kvg.Engine(model, n_ctx=8192, n_seq_max=2) as engine:
        for n in range(12):
            engine.submit(shared + ids_of(model, 60, n), READ).result(60)
        assert engine.stats().decoded_tokens <= 1200 + (32 if model.device == "CPU" else 480)


def test_beside_others_a_step_on_a_device_leaves_a_resume_point(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There prompts are not cut into parts of 64 for them; a quarter of a batch is a step: 192 of 200."""
    shared, told = ids_of(model, 200, 10), kvg.SamplingParams(max_tokens=400)
    prompts = [[*shared, *ids_of(model, 40, n)] for n in (11, 12)]
    with monkeypatch.context() as made:
        made.setattr(model, "device", "GPU0")
        engine = kvg.Engine(model, n_ctx=2048, n_seq_max=3, n_batch=256, background=False, **F32)
    with engine:
        talker = engine.submit(ids_of(model, 4, 13), told)
        engine.step()
        found = [engine.submit(prompt, TALK).result() for prompt in prompts]
        assert not talker.done
    assert found[1].n_cached == (192 if model.arch != DENSE.arch else 200)
    assert all(are_likeliest(model, p, each.tokens) for p, each in zip(prompts, found, strict=True))


@pytest.mark.skipif(not where.is_cpu(), reason="on a device prompts get a quarter of a batch")
def test_beside_answers_prompts_get_36_tokens_a_step(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says a token in each of them; a step ends where a state is kept, at every 64th token."""
    monkeypatch.setattr(TokenBudget, "learn", lambda *args: None)  # a busy machine would get fewer
    with kvg.Engine(model, n_ctx=1024, n_seq_max=2, background=False) as engine:
        talker = engine.submit(ids_of(model, 200, 14), kvg.SamplingParams(max_tokens=40))
        while engine.stats().decoded_tokens < 200:
            engine.step()
        reader, parts = engine.submit(ids_of(model, 100, 15), READ), []
        while not reader.done:
            before = engine.stats().decoded_tokens
            engine.step()
            parts.append(engine.stats().decoded_tokens - before - 1)
        assert not talker.done
        keeps_states = any(group.kind == "state" for group in engine.context.kv.groups)
    assert parts[:2] == ([36, 64 - 36] if keeps_states else [36, 36])
    assert sum(parts) == 100
    assert max(parts) == 36


def test_without_the_index_nothing_is_shared(model: kvg.Model) -> None:
    prompt = ids_of(model, 100, 5)
    with kvg.Engine(model, n_ctx=1024, n_seq_max=2, prefix_cache=False, **F32) as engine:
        found = [engine.submit(prompt, TALK).result(60) for _ in range(2)]
        assert engine.stats().prefix_hit_tokens == 0
        assert sum(engine.stats().cells_used) == 0
    assert all(are_likeliest(model, prompt, each.tokens) for each in found)


def test_samples_share_the_cells_of_their_prompt(dense: kvg.Model) -> None:
    """n forks of c tokens: no cell is copied, and each takes one for a token of its own."""
    prompt = ids_of(dense, 100, 6)
    with kvg.Engine(dense, n_ctx=512, n_seq_max=4, background=False, prefix_cache=False) as engine:
        params = kvg.SamplingParams(max_tokens=8, n=4, temperature=1.0, seed=1)
        request = engine.submit(prompt, params)
        while engine.context.kv.seq_pos_max(3) < 103:
            engine.step()
        assert engine.context.kv.n_used == 100 + 4 * 4
        texts = request.results()
    assert len({text.tokens for text in texts}) == 4
    with kvg.Engine(dense, n_ctx=512, n_seq_max=4) as engine:
        again = engine.submit(prompt, params).results(60)
    assert [text.tokens for text in again] == [text.tokens for text in texts]


def test_texts_under_different_salts_share_nothing(dense: kvg.Model) -> None:
    prompt = ids_of(dense, 100, 7)
    with kvg.Engine(dense, n_ctx=1024, n_seq_max=2) as engine:
        hits = [engine.submit(prompt, READ, salt=salt).result(60).n_cached for salt in ("a", "b", b"a", "")]
    assert hits == [0, 0, 99, 0]


def test_cells_of_old_texts_are_given_up_for_new_ones(dense: kvg.Model) -> None:
    """A cache of 512 cells, texts of 100: the one that was used longest ago is forgotten first."""
    texts = [ids_of(dense, 100, n) for n in range(8)]
    with kvg.Engine(dense, n_ctx=512, n_seq_max=2, **F32) as engine:
        for text in (*texts[:4], texts[0], *texts[4:6]):
            engine.submit(text, TALK).result(60)
        hits = {n: engine.submit(texts[n], TALK).result(60) for n in (0, 1)}
    assert (hits[0].n_cached, hits[1].n_cached) == (99, 0)
    assert are_likeliest(dense, texts[1], hits[1].tokens)


def test_the_youngest_is_set_aside_when_cells_run_out(model: kvg.Model) -> None:
    prompts = [ids_of(model, 40, n) for n in range(4)]
    params = kvg.SamplingParams(max_tokens=60)
    with kvg.Engine(model, n_ctx=256, n_seq_max=4, overcommit=True, **F32) as engine:
        found = [request.result(60) for request in [engine.submit(p, params) for p in prompts]]
        stats = engine.stats()
    assert all(are_likeliest(model, p, each.tokens) for p, each in zip(prompts, found, strict=True))
    assert {len(each.tokens) for each in found} == {60}
    assert stats.n_preempted > 0


def test_what_can_never_fit_is_refused_at_once(dense: kvg.Model) -> None:
    with kvg.Engine(dense, n_ctx=256, n_seq_max=2) as engine:
        with pytest.raises(kvg.CacheFullError, match="309 cells, and there are 256"):
            engine.submit(ids_of(dense, 300, 1), kvg.SamplingParams(max_tokens=10))
        with pytest.raises(kvg.CacheFullError, match="3 samples"):
            engine.submit([1], kvg.SamplingParams(n=3))
        with pytest.raises(kvg.InvalidArgumentError, match="prompt is empty"):
            engine.submit([])
        with pytest.raises(kvg.InvalidArgumentError, match="params must be"):
            engine.submit([1], {"n": 1})  # type: ignore[arg-type]
    with pytest.raises(kvg.InvalidArgumentError, match="engine is closed"):
        engine.submit([1])


def test_cancel_ends_a_request_and_nobody_else(dense: kvg.Model) -> None:
    prompt = ids_of(dense, 40, 8)
    with kvg.Engine(dense, n_ctx=1024, n_seq_max=2, background=False, **F32) as engine:
        first, second, third = (engine.submit(prompt, TALK) for _ in range(3))
        for _ in range(3):
            engine.step()
        first.cancel()
        third.cancel()
        assert are_likeliest(dense, prompt, second.result().tokens)
        said = first.result().tokens
        assert said == second.result().tokens[: len(said)]
        assert 0 < len(said) < 12
        assert [each.result().finish_reason for each in (first, second, third)] == [
            "cancelled",
            "length",
            "cancelled",
        ]
        third.cancel()  # an ended one stays as it is
        assert engine.stats().n_running == engine.stats().n_waiting == 0


def test_close_cancels_what_runs(dense: kvg.Model) -> None:
    engine = kvg.Engine(dense, n_ctx=4096, n_seq_max=1)
    requests = [engine.submit([1, 2, 3], kvg.SamplingParams(max_tokens=4000)) for _ in range(2)]
    next(iter(requests[0]))
    engine.close()
    assert [request.result(1).finish_reason for request in requests] == ["cancelled"] * 2
    engine.close()


def test_pieces_come_to_threads_and_to_event_loops(dense: kvg.Model) -> None:
    prompts = [ids_of(dense, 20, n) for n in range(4)]
    said: dict[int, list[int]] = {}
    with kvg.Engine(dense, n_ctx=1024, n_seq_max=4, **F32) as engine:

        def read(n: int) -> None:
            said[n] = [piece.token for piece in engine.submit(prompts[n], TALK)]

        async def listen(n: int) -> list[int]:
            return [piece.token async for piece in engine.submit(prompts[n], TALK)]

        async def both() -> list[list[int]]:
            return list(await asyncio.gather(listen(2), listen(3)))

        threads = [threading.Thread(target=read, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        said[2], said[3] = asyncio.run(both())
        for thread in threads:
            thread.join()
    assert all(are_likeliest(dense, prompts[n], said[n]) and len(said[n]) == 12 for n in range(4))


def test_text_is_text(stories: Path) -> None:
    """Published text of stories260K, two requests at once."""
    golden = (stories.parent / "stories260K.golden.txt").read_text(encoding="utf-8")
    with (
        kvg.Model(stories, device=where.device) as model,
        kvg.Engine(model, n_ctx=1024, n_seq_max=2) as engine,
    ):
        bos = model.tokenizer.bos
        assert bos is not None
        params = kvg.SamplingParams(max_tokens=100)
        texts = [request.result(60).text for request in [engine.submit([bos], params) for _ in range(2)]]
        assert len(texts[0]) > 200
        assert golden.strip().startswith(texts[0].strip())
        assert texts[0] == texts[1]
        stopped = engine.submit([bos], kvg.SamplingParams(max_tokens=100, stop=["girl"])).result(60)
        assert stopped.finish_reason == "stop"
        assert stopped.text == texts[0].partition("girl")[0]


def test_scores_of_rows_are_numbers(dense: kvg.Model) -> None:
    prompt = ids_of(dense, 20, 1)
    with (
        kvg.Context(dense, n_ctx=64, **F32) as ctx,
        kvg.Engine(dense, n_ctx=64, n_seq_max=1, **F32) as engine,
    ):
        batch = kvg.Batch()
        batch.extend(prompt, 0)
        logits = ctx.decode_last(batch).astype(np.float64)
        (piece,) = engine.submit(prompt, READ)
        expected = logits.max() - np.log(np.exp(logits).sum())
        assert piece.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("salt", [[1], 3, bytearray(b"a"), None])
def test_a_bad_salt_is_refused_and_costs_nobody_anything(dense: kvg.Model, salt: Any) -> None:
    prompt = ids_of(dense, 20, 1)
    with kvg.Engine(dense, n_ctx=256, n_seq_max=2, **F32) as engine:
        other = engine.submit(prompt, TALK)
        with pytest.raises(kvg.InvalidArgumentError, match="salt must be"):
            engine.submit(prompt, TALK, salt=salt)
        assert are_likeliest(dense, prompt, other.result(60).tokens)


def test_other_arguments_are_those_of_the_context(dense: kvg.Model) -> None:
    with kvg.Engine(dense, n_ctx=256, n_seq_max=2, n_batch=64, n_ubatch=16, type_k="bf16") as engine:
        assert (engine.context.n_ubatch, engine.context.type_k) == (16, "bf16")
    with pytest.raises(kvg.InvalidArgumentError, match="engine sizes it itself"):
        kvg.Engine(dense, checkpoint_cells=1)

"""Beams: their texts and scores beside searches over libllama's logits and over none but our own numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance, where
from support.architectures import ArchSpec
from support.engines import Logits, ids_of, run_of
from support.kinds import KINDS
from support.models import TINY, ModelSpec
from support.naive_beams import Search, search
from support.naive_llama import naive_logits
from support.recurrent import MAMBA2
from support.referee import Referee
from support.soak import F32, are_likeliest, logprob_of

import pykvgraph as kvg
from pykvgraph.engine import postprocess

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"
SPECS = [*KINDS, MAMBA2]
BEAMS = kvg.SamplingParams(beam_width=4, n=4, max_tokens=12)


def rows_of_libllama(referee: Referee) -> Callable[[list[list[int]]], Logits]:
    def rows(texts: list[list[int]]) -> Logits:
        tokens = []
        for seq, ids in enumerate(texts):
            referee.seq_rm(seq, -1, -1)
            run = run_of(ids, 0, (seq,))
            tokens += [*(token._replace(logits=False) for token in run[:-1]), run[-1]]
        return referee.decode(tokens)

    return rows


def agrees(found: list[kvg.Completion], expected: Search, ends: set[int]) -> bool:
    """Whether the texts are the same ones; their scores must be, to 1e-4. False: two were too close."""
    best = expected.best[: len(found)]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in best], abs=1e-4)
    if expected.closest < 1e-5:
        return False
    for ours, theirs in zip(found, best, strict=True):
        assert ours.tokens == tuple(token for token in theirs.tokens if token not in ends)
        assert ours.n_said == len(theirs.tokens)
        assert (ours.finish_reason == "stop") == (theirs.tokens[-1] in ends)
    return True


@pytest.mark.parametrize("length_penalty", [1.0, 0.0] if chance.THOROUGH else [1.0])
def test_texts_and_scores_are_those_of_a_search_over_libllama(length_penalty: float) -> None:
    """50 prompts of a published model in F32, four at a time; a text ends with its sentence."""
    with kvg.Model(STORIES) as model:
        text = model.tokenizer.encode((STORIES.parent / "stories260K.golden.txt").read_text(encoding="utf-8"))
        dot = model.tokenizer.encode("end.")[-1]
    prompts = [text[begin : begin + 12] for begin in range(0, 150, 3)]
    params = kvg.SamplingParams(beam_width=4, n=4, max_tokens=14, length_penalty=length_penalty)
    with (
        kvg.Model(STORIES, kv_overrides={"tokenizer.ggml.eos_token_id": dot}) as model,
        kvg.Engine(model, n_ctx=1024, n_seq_max=16, n_threads=1, **F32) as engine,
    ):
        requests = [engine.submit(prompt, params) for prompt in prompts]
        found = [request.results(60) for request in requests]
    with Referee(STORIES, flash=False, kv_type="f32", n_seq_max=4) as referee:
        rows = rows_of_libllama(referee)
        expected = [
            search(rows, prompt, {dot}, width=4, max_tokens=14, length_penalty=length_penalty)
            for prompt in prompts
        ]
    agreed = [agrees(*each, {dot}) for each in zip(found, expected, strict=True)]
    assert len(agreed) == 50 and sum(agreed) > 40
    n_ended = sum(each.finish_reason == "stop" for texts in found for each in texts)
    assert 50 < n_ended < 150


@pytest.mark.parametrize("width", [2, 5])
def test_scores_are_those_of_a_search_without_libllama(
    model_file: Callable[[ModelSpec], Path], width: int
) -> None:
    """A llama in float64, computed by its definition, without a cache."""
    with kvg.Model(model_file(TINY), device=where.device) as model:
        prompts = [ids_of(model, n, n) for n in (1, 7, 20)]
        params = kvg.SamplingParams(beam_width=width, n=width, max_tokens=8)
        with kvg.Engine(model, n_ctx=512, n_seq_max=8, **F32) as engine:
            found = [engine.submit(prompt, params).results(60) for prompt in prompts]
        ends = {token for token in range(model.n_vocab) if model.tokenizer.is_eog(token)}

    def rows(texts: list[list[int]]) -> Logits:
        return np.stack([naive_logits(TINY, ids)[-1] for ids in texts]).astype(np.float32)

    expected = [search(rows, prompt, ends, width=width, max_tokens=8) for prompt in prompts]
    agreed = [agrees(*each, ends) for each in zip(found, expected, strict=True)]
    assert any(agreed)


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.fixture(scope="module")
def dense(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(KINDS[0]), device=where.device) as model:
        yield model


def expected_of(model: kvg.Model, prompt: list[int], max_tokens: int = 12) -> Search:
    """Of BEAMS, over our own logits: each text in a context of its own."""

    def rows(texts: list[list[int]]) -> Logits:
        found = []
        for ids in texts:
            ctx.reset()
            batch = kvg.Batch()
            batch.extend(ids, 0, logits="last")
            found.append(ctx.decode_last(batch))
        return np.stack(found)

    ends = {token for token in range(model.n_vocab) if model.tokenizer.is_eog(token)}
    with kvg.Context(model, n_ctx=256, **F32) as ctx:
        return search(rows, prompt, ends, width=4, max_tokens=max_tokens)


def test_beams_run_beside_others_in_the_same_batches(model: kvg.Model) -> None:
    """On every kind of model: windows and states follow their beams."""
    prompt = ids_of(model, 40, 1)
    expected = expected_of(model, prompt)
    with kvg.Engine(model, n_ctx=1024, n_seq_max=6, background=False, **F32) as engine:
        others = [engine.submit(ids_of(model, n, n), kvg.SamplingParams(max_tokens=12)) for n in (20, 30)]
        found = engine.submit(prompt, BEAMS).results()
        said = [other.result() for other in others]
        assert engine.stats().steps < 12 + 5
        again = engine.submit(prompt, BEAMS).results()
    for n, each in zip((20, 30), said, strict=True):
        assert are_likeliest(model, ids_of(model, n, n), each.tokens)
    assert agrees(found, expected, set()) and agrees(again, expected, set())
    assert again[0].n_cached == 39 and [each.n_said for each in found] == [12] * 4


def test_forks_copy_nothing_and_dropped_beams_leave_no_cells(dense: kvg.Model) -> None:
    """After each step there is a cell for each token that some beam has, shared ones counted once."""
    prompt = ids_of(dense, 50, 2)
    steps = expected_of(dense, prompt, 30).steps
    with kvg.Engine(
        dense, n_ctx=512, n_seq_max=4, background=False, prefix_cache=False, defrag_threshold=-1, **F32
    ) as engine:
        kv = engine.context.kv
        request = engine.submit(prompt, dataclasses.replace(BEAMS, max_tokens=30))
        n_shared = 0
        for live in steps[:-1]:
            engine.step()
            # the last token of each isn't decoded yet; a beam that nothing goes on from is gone
            had = {text.tokens[:n] for text in live for n in range(1, len(text.tokens))}
            assert kv.n_used == 50 + len(had)
            n_shared += kv.seq_count(engine._loop.stepper._scheduler.running[0].seq, 50, -1).n_shared
        request.results()
        assert kv.n_used == 0 and n_shared > 20
        stats = kv.take_stats()
        assert (stats.moved_cells, stats.shifted_cells) == (0, 0)


def test_the_best_text_is_a_prefix_for_others(dense: kvg.Model) -> None:
    prompt = ids_of(dense, 40, 3)
    with kvg.Engine(dense, n_ctx=512, n_seq_max=4, **F32) as engine:
        best = engine.submit(prompt, BEAMS).result(60)
        next_turn = [*prompt, *best.tokens, *ids_of(dense, 5, 4)]
        # but for its last token, which was never decoded
        assert engine.submit(next_turn, kvg.SamplingParams(max_tokens=1)).result(60).n_cached == 51


@pytest.mark.parametrize("n_steps", [0, 3, 7])
def test_cancel_hands_out_the_best_so_far(model: kvg.Model, n_steps: int) -> None:
    prompt = ids_of(model, 20, 5)
    with kvg.Engine(model, n_ctx=256, n_seq_max=4, background=False, **F32) as engine:
        request = engine.submit(prompt, BEAMS)
        other = engine.submit(prompt, kvg.SamplingParams(max_tokens=5))
        for _ in range(n_steps):
            engine.step()
        request.cancel()
        engine.step()
        found = request.results()
        assert {each.finish_reason for each in found} == {"cancelled"}
        assert other.result().finish_reason == "length"
        assert engine.stats().n_running == 0
        assert all(engine.context.kv.seq_pos_max(seq) < 0 for seq in range(4))
        pieces = list(request)
    n_said = {each.n_said for each in found}
    assert len(n_said) == 1 and (n_said == {0}) == (n_steps == 0)
    for sample, each in enumerate(found):
        said = [piece for piece in pieces if piece.seq == sample]
        assert tuple(piece.token for piece in said) == each.tokens
    if n_steps:
        expected = expected_of(model, prompt).steps[n_said.pop() - 1]
        assert [each.tokens for each in found] == [text.tokens for text in expected]


@pytest.mark.parametrize("way", ["parked", "preempted"])
def test_who_gives_way_finds_the_same_texts_again(model: kvg.Model, way: str) -> None:
    prompt = ids_of(model, 40, 6)
    params = dataclasses.replace(BEAMS, max_tokens=20)
    n_ctx = 512 if way == "parked" else 128
    with kvg.Engine(model, n_ctx=n_ctx, n_seq_max=6, overcommit=True, background=False, **F32) as engine:
        first = engine.submit(ids_of(model, 60, 7), kvg.SamplingParams(max_tokens=40))
        request = engine.submit(prompt, params)
        for _ in range(8):
            engine.step()
        if way == "parked":
            assert engine.park(request) and engine.stats().n_parked == 1
            assert first.result().finish_reason == "length"
            assert engine.resume(request)
        found = request.results()
        assert first.result().finish_reason == "length"
        assert engine.stats().n_preempted == 0 if way == "parked" else engine.stats().n_preempted > 0
    assert agrees(found, expected_of(model, prompt, 20), set())


def test_the_pieces_are_those_of_the_best_texts(dense: kvg.Model) -> None:
    with kvg.Engine(dense, n_ctx=512, n_seq_max=4, **F32) as engine:
        request = engine.submit(ids_of(dense, 9, 8), dataclasses.replace(BEAMS, n=2, top_logprobs=3))
        pieces, found = list(request), request.results()
    assert [piece.seq for piece in pieces] == [0] * 12 + [1] * 12
    for sample, each in enumerate(found):
        said = [piece for piece in pieces if piece.seq == sample]
        assert "".join(piece.text for piece in said) == each.text
        assert sum(piece.logprob for piece in said) == pytest.approx(each.logprob)
        assert all(len(piece.top) == 3 and piece.top[0][1] >= piece.logprob for piece in said)
    assert found[0].logprob > found[1].logprob


def test_a_stop_string_ends_a_beam() -> None:
    """Each text says nothing of it, and ends there; the others go on."""
    params = kvg.SamplingParams(beam_width=4, n=4, max_tokens=30, stop="park", length_penalty=0.0)
    with kvg.Model(STORIES) as model, kvg.Engine(model, n_ctx=1024, n_seq_max=4, **F32) as engine:
        found = engine.submit("Once upon a time there was a girl. She went to the", params).results(60)
    stopped = [each for each in found if each.finish_reason == "stop"]
    assert stopped and {each.stopping_word for each in stopped} == {"park"}
    assert not any("park" in each.text for each in found)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_grammar_holds_for_every_beam(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """The probabilities of what it allows stay the model's own. Late: no step waits for it."""
    if is_late:
        monkeypatch.setattr(postprocess, "_GRAMMAR_PATIENCE", -math.inf)
    params = kvg.SamplingParams(
        beam_width=4, n=4, max_tokens=20, grammar='root ::= " cat" | " dog" | " b" [ae] "r"'
    )
    prompt = "Once upon a time, there was a"
    with kvg.Model(STORIES) as model, kvg.Engine(model, n_ctx=1024, n_seq_max=5, **F32) as engine:
        other = engine.submit(prompt, kvg.SamplingParams(max_tokens=100))
        found = engine.submit(prompt, params).results(60)
        assert other.result(60).finish_reason == "length"
        ids = model.tokenizer.encode(prompt)
        for each in found:
            assert each.text in (" cat", " dog", " bar", " ber") and each.finish_reason == "stop"
            assert model.tokenizer.eos is not None
            said = [*each.tokens, model.tokenizer.eos]
            assert logprob_of(model, ids, said) == pytest.approx(each.logprob, abs=1e-4)
    assert len({each.tokens for each in found}) == 4


def test_in_place_of_a_text_that_there_is_not_an_empty_one_comes() -> None:
    params = kvg.SamplingParams(beam_width=4, n=3, max_tokens=20, grammar='root ::= "a"')
    with kvg.Model(STORIES) as model, kvg.Engine(model, n_ctx=1024, n_seq_max=4, **F32) as engine:
        found = engine.submit("Once upon", params).results(60)
    # one of a token, one of a byte's token
    assert [each.text for each in found] == ["a", "a", ""]
    assert [each.logprob > -math.inf for each in found] == [True, True, False]
    assert [each.finish_reason for each in found] == ["stop"] * 3


def test_what_cannot_be_is_refused_at_once(dense: kvg.Model) -> None:
    with kvg.Engine(dense, n_ctx=256, n_seq_max=4, n_batch=8, n_ubatch=8) as engine:
        with pytest.raises(kvg.CacheFullError, match="5 samples or beams"):
            engine.submit([1], kvg.SamplingParams(beam_width=5))
        with pytest.raises(kvg.CacheFullError, match="406 cells"):
            engine.submit(ids_of(dense, 10, 1), kvg.SamplingParams(beam_width=4, max_tokens=100))
        with pytest.raises(kvg.InvalidArgumentError, match="one sample or beam"):
            engine.submit([1], BEAMS, window=kvg.Window(64))
        with pytest.raises(kvg.InvalidArgumentError, match="one sample"):
            engine.submit([1], BEAMS, said=[1])
    with (
        kvg.Engine(dense, n_ctx=256, n_seq_max=4, n_batch=3, n_ubatch=3) as engine,
        pytest.raises(kvg.InvalidArgumentError, match="4 beams are decoded in one batch"),
    ):
        engine.submit([1], BEAMS)


def test_drafts_are_of_others_only(dense: kvg.Model) -> None:
    prompt = ids_of(dense, 10, 9) * 4
    expected = expected_of(dense, prompt)
    with kvg.Engine(dense, n_ctx=1024, n_seq_max=6, draft="ngram", background=False, **F32) as engine:
        request = engine.submit(prompt, BEAMS)
        other = engine.submit(prompt, kvg.SamplingParams(max_tokens=40))
        found = request.results()
        other.result()
    assert {each.drafted for each in found} == {0}
    assert agrees(found, expected, set())
